"""Members of SGLang's bodies that ask for nothing: clients send its whole form, mostly at its defaults.

Taken out before a body is checked, so that what is left and unknown is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from services.shared import limits

# Fields of SGLang's GenerateReqInput and EmbeddingReqInput that this server has no use for, and their values that change
# nothing in the answer. Null does so for every field.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio_data": ([],),
    "background": (False,),
    "image_data": ([],),
    "is_cross_encoder_request": (False,),
    "log_metrics": (True, False),
    "lora_path": (),
    "modalities": ([], ["text"]),
    "need_wait_for_mm_processing": (False,),
    "no_logs": (True, False),
    "require_reasoning": (False,),
    "return_bytes": (False,),
    "return_entropy": (False,),
    "return_hidden_states": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "video_data": ([],),
}


def without_neutral(body: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The body without members that ask for nothing, except those with a name in `known`."""
    return {name: value for name, value in body.items() if name in known or not _asks_for_nothing(name, value)}


def _asks_for_nothing(name: str, value: Any) -> bool:
    if value is None:
        return True
    neutral = _NEUTRAL.get(name)
    if neutral is None:
        return False
    is_one_per_prompt = isinstance(value, list) and len(value) <= limits.MAX_BATCH_PROMPTS
    return _is_one_of(value, neutral) or (is_one_per_prompt and all(one is None or _is_one_of(one, neutral) for one in value))


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    """0 is not False here."""
    return any(type(value) is type(one) and value == one for one in neutral)

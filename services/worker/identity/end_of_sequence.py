"""Finds the end-of-sequence tokens of a model folder: every EOS token that one of its files names.

Files in published folders disagree: a fine-tuned model often ends its turns with the tokenizer's `eos_token`, while config.json
and generation_config.json still name the base model's token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rootstock_llm.services.shared.hf_tokenizer import HfTokenizer

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json")
NESTED = ("text_config", "llm_config", "language_config")  # keys of the language model in the config.json of a multimodal model


def end_of_sequence(folder: str | Path, of_config: Sequence[int], tokenizer: HfTokenizer, vocab_size: int) -> tuple[int, ...]:
    """Returns the token ids that end the output, without duplicates.

    Args:
        folder: the model folder.
        of_config: EOS ids of the loaded config object, which has the default of its class if config.json names no id.
        tokenizer: the model's tokenizer.
        vocab_size: number of tokens that the model can sample; ids that are not below it are omitted.

    Raises:
        ValueError: a file is not a JSON object, or its `eos_token_id` is neither an id nor a list of ids.
    """
    found = [*_named_ids(Path(folder)), *of_config, *_tokenizer_ids(Path(folder), tokenizer)]
    return tuple(token for token in dict.fromkeys(found) if token < vocab_size)


def _named_ids(folder: Path) -> Iterator[int]:
    for name in (GENERATION, CONFIG):
        content = _object(folder / name)
        for part in (content, *(nested for key in NESTED if isinstance(nested := content.get(key), dict))):
            yield from _ids(part.get("eos_token_id"), folder / name)


def _tokenizer_ids(folder: Path, tokenizer: HfTokenizer) -> Iterator[int]:
    """Yields the id of the `eos_token` in each tokenizer file. Skips a token that is not in the vocabulary."""
    for name in TOKENIZER_FILES:
        token = _object(folder / name).get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        found = tokenizer.token_id(text) if isinstance(text, str) else None
        if found is not None:
            yield found


def _ids(value: Any, path: Path) -> list[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(each, bool) or not isinstance(each, int) or each < -1 for each in ids):
        raise ValueError(f"{path}: 'eos_token_id' is {json.dumps(value)}; it must be a token id or a list of token ids.")
    return [each for each in ids if each >= 0]  # some folders write -1 if the model has no such token


def _object(path: Path) -> dict[str, Any]:
    """Returns the content of a JSON file; empty if the file is missing. Raises ValueError if it is not a JSON object."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object.")
    return content

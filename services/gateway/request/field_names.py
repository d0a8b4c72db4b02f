"""The names that clients of each API know for the fields of a request. Errors use them.

Workers name a refused field by its path in their messages, such as `max_new_tokens`. The gateway names a field of a chat by its
path in ChatRequest, such as `messages`. The table of an API maps these paths to the API's own names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from services.shared.sampling_parameters import Api, renamed


@dataclass(frozen=True, slots=True)
class FieldNames:
    """One API's names of the fields that errors name."""

    names: Mapping[str, str] = field(default_factory=dict)  # client's name by path, or by the first part of the path
    prefix: str = ""  # client's path of the sampling parameters; "" for the body itself. Goes before names that are not listed

    def of(self, path: str) -> str:
        """Returns the client's name of a path. A path without an entry in the table is its own name."""
        for known in (path, path.partition(".")[0], path.partition("[")[0]):
            if known in self.names:
                return self.names[known]
        return f"{self.prefix}.{path}" if self.prefix else path

    def within(self, prefix: str, prompt: str) -> FieldNames:
        """Returns these names for sampling parameters at the path `prefix`, and a prompt in the field `prompt`."""
        return replace(self, prefix=prefix, names={**self.names, "prompt_ids": prompt})


NO_NAMES = FieldNames()  # the client's names are the paths
_SESSION = {
    "session": "session_params",
    "session.session_id": "session_params.id",
    "session.parent_request_id": "session_params.rid",
    "session.offset": "session_params.offset",
}
_OPENAI = {
    **_SESSION,
    **renamed(Api.CHAT),
    "request_id": "rid",
    "dry": "dry_multiplier",
    "logprobs.token_ids": "logprob_token_ids",
}
CHAT = FieldNames({**_OPENAI, "prompt_ids": "messages", "prediction_ids": "prediction", "logprobs.top": "top_logprobs"})
MESSAGES = FieldNames(
    {**CHAT.names, "messages": "messages", "reasoning_effort": "output_config.effort", "stop": "stop_sequences"}
)
RESPONSES = FieldNames(
    {
        **CHAT.names,
        "messages": "input",
        "prompt_ids": "input",
        "reasoning_effort": "reasoning.effort",
        "max_new_tokens": "max_output_tokens",
        "logprobs": "include",
    }
)
COMPLETION = FieldNames({**_OPENAI, "prompt_ids": "prompt", "logprobs": "logprobs", "logprobs.prompt_from": "echo"})
_VECTOR = {"embedding.dimensions": "dimensions", "embedding.normalize": "normalize", "embedding": "model"}
EMBEDDING = FieldNames({**_VECTOR, "prompt_ids": "input", "request_id": "rid"})
GENERATE = FieldNames(
    {
        **_SESSION,
        "logprobs": "return_logprob",
        "logprobs.top": "top_logprobs_num",
        "logprobs.token_ids": "token_ids_logprob",
        "logprobs.prompt_from": "logprob_start_len",
        "cache_salt": "extra_key",
        "priority": "priority",
        "routing_key": "routing_key",
        "request_id": "rid",
        **{wire: f"sampling_params.{name}" for wire, name in renamed(Api.GENERATE).items()},
    }
)
ENCODE = FieldNames({**_VECTOR, "cache_salt": "extra_key", "request_id": "rid"})
SCORE = FieldNames({"score": "label_token_ids", "cache_salt": "extra_key", "request_id": "rid", "prompt_ids": "items"})

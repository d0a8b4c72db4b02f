"""Workers name what they refuse by its path in their messages; a client is told its own field's name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from services.shared.sampling_parameters import Api, renamed


@dataclass(frozen=True, slots=True)
class ClientFields:
    """names: a worker's name, or the part of it before a dot → the client's. prefix: the path in which the client's sampling
    parameters stand, "" for the body itself; it goes before names that are not listed."""

    names: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""

    def of(self, name: str) -> str:
        for known in (name, name.partition(".")[0]):
            if known in self.names:
                return self.names[known]
        return f"{self.prefix}.{name}" if self.prefix else name

    def within(self, prefix: str, prompt: str) -> ClientFields:
        """With the sampling parameters at this path, and the prompt in that field."""
        return replace(self, prefix=prefix, names={**self.names, "prompt_ids": prompt})


NO_FIELDS = ClientFields()  # the client's names are the workers'
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
CHAT = ClientFields({**_OPENAI, "prompt_ids": "messages", "prediction_ids": "prediction", "logprobs.top": "top_logprobs"})
COMPLETION = ClientFields({**_OPENAI, "prompt_ids": "prompt", "logprobs": "logprobs", "logprobs.prompt_from": "echo"})
_VECTOR = {"embedding.dimensions": "dimensions", "embedding.normalize": "normalize", "embedding": "model"}
EMBEDDING = ClientFields({**_VECTOR, "prompt_ids": "input", "request_id": "rid"})
GENERATE = ClientFields(
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
ENCODE = ClientFields({**_VECTOR, "cache_salt": "extra_key", "request_id": "rid"})
SCORE = ClientFields({"score": "label_token_ids", "cache_salt": "extra_key", "request_id": "rid", "prompt_ids": "items"})

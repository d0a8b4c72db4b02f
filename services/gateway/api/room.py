"""How long a prompt may be, and what becomes of a longer one. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rootstock.v1 import tokenizer_pb2
from services.gateway.request.errors import bad_request, context_length_exceeded
from services.gateway.request.generation import ModelInfo, Prompt
from services.shared.index.block_hash import BLOCK_TOKENS, HASH_BYTES


@dataclass(frozen=True, slots=True)
class Room:
    """answers: so many tokens are left for an answer. cuts: of a longer prompt the first tokens are taken, else it is refused."""

    context_len: int
    answers: int
    cuts: bool

    def check(self, tokens: int, param: str) -> None:
        """Raises ApiError that names the client's field."""
        if tokens == 0:
            raise bad_request(param, "The prompt has no tokens.")
        most = self.context_len - self.answers
        if tokens <= most or (self.cuts and most > 0):
            return
        if self.answers:
            raise context_length_exceeded(param, self.context_len, tokens)
        message = f"This model's maximum context length is {self.context_len} tokens, and the input has {tokens}."
        raise bad_request(param, message, "context_length_exceeded")

    def fit(self, prompt: Prompt, param: str) -> Prompt:
        """The prompt, or its beginning; what echo repeats and the index knows is then the beginning's too. Raises ApiError."""
        tokens, most = len(prompt.ids), self.context_len - self.answers
        self.check(tokens, param)
        if tokens <= most:
            return prompt
        ids = tokenizer_pb2.TokenIds(ids=prompt.ids[:most]).ids
        hashes = prompt.block_hashes[: most // BLOCK_TOKENS * HASH_BYTES]
        return replace(prompt, ids=ids, text=None, block_hashes=hashes, num_cut=tokens - most)


def for_an_answer(model: ModelInfo, in_session: bool = False) -> Room:
    """At least one token is left. What a session's context leaves only its worker knows: a turn is not cut."""
    return Room(model.context_len, 1, model.auto_truncates and not in_session)


def for_a_vector(model: ModelInfo) -> Room:
    """What is only read may fill the context."""
    return Room(model.context_len, 0, model.auto_truncates)

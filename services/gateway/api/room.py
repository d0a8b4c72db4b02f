"""How long a prompt may be, and what becomes of a longer one. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rootstock.v1 import tokenizer_pb2
from services.gateway.request.errors import bad_request, context_length_exceeded
from services.gateway.request.generation import ModelInfo, Prompt
from services.gateway.request.trace import EncodeCall
from services.shared.index.block_hash import BLOCK_TOKENS, HASH_BYTES


@dataclass(frozen=True, slots=True)
class Room:
    """answers: so many tokens are left for an answer. cuts: of a longer prompt the first tokens are taken, else it is refused."""

    context_len: int
    answers: int
    cuts: bool

    @property
    def most(self) -> int:
        """Tokens of a prompt."""
        return self.context_len - self.answers

    def bound(self, call: EncodeCall) -> None:
        """Tells the tokenizer where it may stop."""
        call.max_tokens, call.cuts = max(self.most, 0), self.cuts

    def check(self, tokens: int, param: str, is_bound: bool = False) -> None:
        """is_bound: there may be more. Raises ApiError that names the client's field."""
        if tokens == 0:
            raise bad_request(param, "The prompt has no tokens.")
        if tokens <= self.most or (self.cuts and self.most > 0):
            return
        said = f"at least {tokens}" if is_bound else str(tokens)
        if self.answers:
            raise context_length_exceeded(param, self.context_len, said)
        message = f"This model's maximum context length is {self.context_len} tokens, and the input has {said}."
        raise bad_request(param, message, "context_length_exceeded")

    def fit(self, prompt: Prompt, param: str) -> Prompt:
        """The prompt, or its beginning; what echo repeats and the index knows is then the beginning's too. Raises ApiError."""
        tokens, most = prompt.at_least or len(prompt.ids), self.most
        self.check(tokens, param, prompt.at_least > 0)
        if tokens <= most:
            return prompt
        ids = tokenizer_pb2.TokenIds(ids=prompt.ids[:most]).ids
        hashes = prompt.block_hashes[: most // BLOCK_TOKENS * HASH_BYTES]
        return replace(prompt, ids=ids, text=None, block_hashes=hashes, num_cut=tokens - most, at_least=0)


UNBOUNDED = Room((1 << 31) - 1, 0, False)  # of a prompt that is only counted


def for_an_answer(model: ModelInfo, in_session: bool = False) -> Room:
    """At least one token is left. What a session's context leaves only its worker knows: a turn is not cut."""
    return Room(model.context_len, 1, model.auto_truncates and not in_session)


def for_a_vector(model: ModelInfo) -> Room:
    """What is only read may fill the context."""
    return Room(model.context_len, 0, model.auto_truncates)

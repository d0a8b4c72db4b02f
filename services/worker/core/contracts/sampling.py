"""Sampling parameters as the scheduler and the executor see them. Plain data; nobody mutates it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

DEFAULT_STREAM_INTERVAL = 1
FORCE_STREAM_INTERVAL = 50  # tokens between messages of a request that does not stream


class GrammarKind(enum.StrEnum):
    JSON_OBJECT = "json_object"  # any JSON object; source is empty
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class GrammarPart:
    """A part of a structural tag that was made of a schema or pattern of the client's."""

    pointer: str  # JSON pointer into the tag, such as #/format/tags/0
    within: str = ""  # where the part's schema is in the client's one: a JSON pointer without the #
    partial: bool = False  # keywords that are not supported are left out of it


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What the output must be. Equal specs share one compiled grammar."""

    kind: GrammarKind
    source: str  # the schema, pattern or grammar as text
    parts: tuple[GrammarPart, ...] = ()  # of a structural tag that the client has not seen

    @property
    def label(self) -> str:
        """The word for the grammar in a refusal. The client knows the kind unless a gateway has made the tag."""
        return "the grammar" if self.parts else self.kind


@dataclass(frozen=True, slots=True)
class EmbeddingParams:
    """The request wants a vector instead of tokens. dimensions: 0 for all, else the first so many; normalize: to length 1
    after the cut, None for what the model's files say."""

    dimensions: int = 0
    normalize: bool | None = None


@dataclass(frozen=True, slots=True)
class ScoreParams:
    """The request wants the log probabilities of some tokens behind its prompt instead of output."""

    label_token_ids: tuple[int, ...]  # 1 or more ids within the vocabulary; the result has their order


@dataclass(frozen=True, slots=True)
class DryParams:
    """Penalty on continuing a repetition ("Don't Repeat Yourself"): a token that would extend a repeat of n tokens,
    n >= allowed_length, loses multiplier * base ** (n - allowed_length). window: last tokens looked at, 0 for all.
    breakers: token ids that no repeat runs across."""

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    window: int = 0
    breakers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling and stopping rules, every default resolved.

    temperature: 0 means greedy. top_k: -1 means the whole vocabulary, and so does top_n_sigma: 0.
    max_new_tokens: already clipped to the context; 0: the request ends with its prompt.
    logit_bias: (token id, added to the logit) pairs.
    allowed_token_ids: empty for all. seed: 64 bits; with the absolute token position it fixes each draw, so a request
    samples the same tokens whatever shares its batch. top_logprobs: -1 means no logprobs of outputs, 0 the sampled
    token's alone. logprob_token_ids: further ids whose logprobs are wanted wherever logprobs are. prompt_logprobs_from:
    position of the first prompt token whose logprob is wanted (position 0 has none), -1 for none; they come with the
    same top_logprobs and logprob_token_ids. speculative: tokens may be guessed ahead and verified, where somebody guesses.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    top_n_sigma: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    dry: DryParams | None = None
    min_new_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    seed: int = 0
    top_logprobs: int = -1
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs_from: int = -1
    grammar: GrammarSpec | None = None
    embedding: EmbeddingParams | None = None
    score: ScoreParams | None = None
    stream_interval: int = DEFAULT_STREAM_INTERVAL
    skip_special_tokens: bool = True
    speculative: bool = True

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled. If not, the request ends with its prompt and reserves no KV for output."""
        return self.max_new_tokens > 0 and self.embedding is None and self.score is None

"""Immutable sampling parameters, as the scheduler and the executor use them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

DEFAULT_STREAM_INTERVAL = 1
FORCE_STREAM_INTERVAL = 50  # tokens between two messages of a request that does not stream


class GrammarKind(enum.StrEnum):
    JSON_OBJECT = "json_object"  # any JSON object; GrammarSpec.source is empty
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class GrammarPart:
    """A part of a structural tag that a gateway has made from a schema or pattern of the client."""

    pointer: str  # JSON pointer into the tag, such as #/format/tags/0
    within: str = ""  # position of the part's schema in the client's schema, as a JSON pointer without the #
    partial: bool = False  # whether unsupported keywords of the schema are left out


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """The rule for a request's output. Equal specs share one compiled grammar."""

    kind: GrammarKind
    source: str  # the schema, pattern or grammar as text
    parts: tuple[GrammarPart, ...] = ()  # parts of a structural tag that a gateway has made and the client has not seen

    @property
    def label(self) -> str:
        """The name of the grammar in a refusal. The client knows the kind unless a gateway has made the structural tag."""
        return "the grammar" if self.parts else self.kind


@dataclass(frozen=True, slots=True)
class EmbeddingParams:
    """A request for a vector instead of tokens."""

    dimensions: int = 0  # number of first dimensions to return; 0 for all
    # Whether the returned dimensions are scaled to length 1; without a value, the model's files decide.
    normalize: bool | None = None


@dataclass(frozen=True, slots=True)
class ScoreParams:
    """A request for the log probabilities of some tokens after its prompt, instead of output."""

    label_token_ids: tuple[int, ...]  # one or more ids within the vocabulary, in the order of the result


@dataclass(frozen=True, slots=True)
class DryParams:
    """A penalty on continuing a repetition ("Don't Repeat Yourself").

    A token that would extend a repeat of n tokens, n >= allowed_length, loses multiplier * base ** (n - allowed_length).
    """

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    window: int = 0  # number of last tokens that are searched; 0 for all
    breakers: tuple[int, ...] = ()  # token ids that end every repeat


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The rules for sampling and stopping of one request. Every default is resolved."""

    max_new_tokens: int  # clipped to the context; 0: the request ends with its prompt
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: the whole vocabulary
    min_p: float = 0.0
    top_n_sigma: float = 0.0  # 0: the whole vocabulary
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, value that is added to its logit)
    allowed_token_ids: tuple[int, ...] = ()  # empty: all tokens are allowed
    banned_token_ids: tuple[int, ...] = ()
    dry: DryParams | None = None
    min_new_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    # 64 bits. Seed and absolute token position determine each draw, so that a request samples the same tokens in any batch.
    seed: int = 0
    top_logprobs: int = -1  # -1: no logprobs of outputs; 0: only the sampled token's
    logprob_token_ids: tuple[int, ...] = ()  # further ids whose logprobs are returned with all other logprobs
    # Position of the first prompt token whose logprob is wanted, at least 1; -1: no logprobs of the prompt. They follow
    # top_logprobs and logprob_token_ids.
    prompt_logprobs_from: int = -1
    grammar: GrammarSpec | None = None
    embedding: EmbeddingParams | None = None
    score: ScoreParams | None = None
    stream_interval: int = DEFAULT_STREAM_INTERVAL
    skip_special_tokens: bool = True
    speculative: bool = True  # draft tokens may be verified for this request, if the worker drafts

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled. If not, the request ends with its prompt and reserves no KV for output."""
        return self.max_new_tokens > 0 and self.embedding is None and self.score is None

"""The table of sampling parameters: names, ranges, defaults and neutral values. Plain data; standard library only.

The gateway's body types, the checks of gateway and worker, the wire values, the model's defaults, and the tables in
docs/reference/api.md and docs/reference/sglang-api.md are derived from this table. Limits of entries and characters are in
services/shared/limits.py.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from rootstock_llm.services.shared import limits

UINT32_MAX = (1 << 32) - 1
INT64 = (-(1 << 63), (1 << 63) - 1)
COMPLETION_TOKENS = 16  # default of max_tokens on /v1/completions
GENERATE_TOKENS = 128  # default of max_new_tokens on /generate
SMALLEST_POSITIVE = 2.0**-126  # smallest normal float32; devices may treat smaller numbers as 0


class Api(enum.StrEnum):
    """The endpoints that generate text, by route."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"
    GENERATE = "/generate"  # parameters are members of its sampling_params


class Kind(enum.StrEnum):
    """The type of a parameter's value, in the words of error messages and docs."""

    NUMBER = "number"
    INTEGER = "whole number"
    FLAG = "true or false"
    TEXTS = "string or list of strings"
    STRINGS = "list of strings"
    TOKEN_IDS = "list of token ids"
    BIASES = "object of numbers"  # by token id


@dataclass(frozen=True, slots=True)
class SamplingParameter:
    """A row of the table of sampling parameters."""

    names: Mapping[Api, str]  # name in each API that accepts the parameter
    wire: str  # field of the message SamplingParams, e.g. "dry.base"; "" if only the gateway uses the parameter
    kind: Kind
    doc: str  # meaning, for the tables in docs/ and the OpenAPI document
    low: float | None = None  # smallest value (of BIASES: of each number); None: unlimited
    high: float | None = None  # largest value; None: unlimited
    default: float | None = None  # None: the default depends on the request, the model or the worker
    neutral: tuple[float, ...] = ()  # values without effect; the core uses the first one. Empty: every value has an effect
    of_model: bool = False  # whether a model's files or an operator may set another default
    least: int = 0  # smallest number of entries of a list
    most: int = 0  # largest number of entries of a list
    chars: int = 0  # largest length of each text; the smallest is 1
    excludes_low: bool = False  # whether values must be greater than `low`

    def fault(self, value: Any) -> str:
        """Returns the fault of a scalar value, or of one number of BIASES; "" if it is valid."""
        if self.kind is Kind.FLAG:
            return "" if type(value) is bool else f"must be {Kind.FLAG}"
        low, high, what = self.low, self.high, Kind.INTEGER if self.kind is Kind.INTEGER else Kind.NUMBER
        fits = type(value) is int or (type(value) is float and what is Kind.NUMBER)
        inside = fits and (low is None or low <= value) and (high is None or value <= high)
        if inside and not (self.excludes_low and value == low):
            return ""
        return f"must be a {what} {self._range()}"

    def _range(self) -> str:
        if self.excludes_low:
            return f"above {self.low:.10g} and at most {self.high:.10g}"
        return spelled(self.low, self.high)

    def resolved(self, value: Any) -> Any:
        """Converts a valid value to its form in the core and on the wire.

        Each neutral value becomes the first neutral value. If `low` is excluded, a value below SMALLEST_POSITIVE becomes
        SMALLEST_POSITIVE, so that it is not 0 as float32.
        """
        if value in self.neutral:
            return self.neutral[0]
        return max(value, SMALLEST_POSITIVE) if self.excludes_low else value


@dataclass(frozen=True, slots=True)
class UnservedParameter:
    """A parameter that would change completions and is refused because it is not implemented."""

    name: str
    apis: tuple[Api, ...]
    neutral: tuple[Any, ...] = ()  # values without effect; they are accepted, as null is


def spelled(low: float | None, high: float | None) -> str:
    """Returns a range in words, such as "from 0 to 2" or "of at least 1"; "" for an unlimited range."""
    if high is None:
        return "" if low is None else f"of at least {low:.10g}"
    return f"from {low:.10g} to {high:.10g}"


OPENAI = (Api.CHAT, Api.COMPLETION)
Names = Mapping[Api, str]


def _on(apis: Iterable[Api], name: str) -> Names:
    return MappingProxyType(dict.fromkeys(apis, name))


def _everywhere(name: str) -> Names:
    return _on(Api, name)


def _renamed(openai: str, generate: str) -> Names:
    return MappingProxyType({**_on(OPENAI, openai), Api.GENERATE: generate})


def _number(
    name: str, low: float, high: float, off: float, doc: str, of_model: bool = False, excludes_low: bool = False
) -> SamplingParameter:
    """Returns the table row of a parameter of kind NUMBER. `off` is the default and the neutral value."""
    return SamplingParameter(
        _everywhere(name), name, Kind.NUMBER, doc, low, high, off, (off,), of_model, excludes_low=excludes_low
    )


def _integer(
    names: Names,
    wire: str,
    low: int,
    high: int | None,
    doc: str,
    default: int | None = None,
    neutral: tuple[int, ...] = (),
    of_model: bool = False,
) -> SamplingParameter:
    return SamplingParameter(names, wire, Kind.INTEGER, doc, low, high, default, neutral, of_model)


def _flag(names: Names, wire: str, off: bool, doc: str) -> SamplingParameter:
    return SamplingParameter(names, wire, Kind.FLAG, doc, default=off, neutral=(off,))


def _texts(name: str, most: int, chars: int, doc: str) -> SamplingParameter:
    return SamplingParameter(_everywhere(name), name, Kind.TEXTS, doc, most=most, chars=chars)


def _token_ids(name: str, most: int, doc: str, least: int = 0) -> SamplingParameter:
    return SamplingParameter(_everywhere(name), name, Kind.TOKEN_IDS, doc, least=least, most=most)


# Parameters with the same name in SamplingParams on the wire and in the core.
SCALARS = (
    _number("temperature", 0.0, 100.0, 1.0, "Divisor of the logits. 0: always the most likely token.", of_model=True),
    _number(
        "top_p",
        0.0,
        1.0,
        1.0,
        "Samples from the most likely tokens whose probabilities add up to this share. 0: always the most likely token.",
        of_model=True,
    ),
    _integer(
        _everywhere("top_k"),
        "top_k",
        -1,
        1 << 30,
        "Samples from this many most likely tokens. 0 or -1: from all.",
        -1,
        (-1, 0),
        of_model=True,
    ),
    _number("min_p", 0.0, 1.0, 0.0, "Smallest probability of a token, relative to that of the most likely token.", of_model=True),
    _number(
        "top_n_sigma",
        0.0,
        1e6,
        0.0,
        "Samples from tokens with a logit within *n* standard deviations of the largest logit. Applies before `top_k`, `top_p`"
        " and `min_p`. 0: all tokens.",
    ),
    _number(
        "repetition_penalty",
        0.0,
        2.0,
        1.0,
        "Factor that makes tokens of the prompt and the completion less likely if it is above 1.",
        of_model=True,
        excludes_low=True,
    ),
    _number("frequency_penalty", -2.0, 2.0, 0.0, "Subtracted from a logit for each occurrence of the token in the completion."),
    _number("presence_penalty", -2.0, 2.0, 0.0, "Subtracted from the logit of each token that is in the completion."),
    _integer(
        _renamed("min_tokens", "min_new_tokens"),
        "min_new_tokens",
        0,
        UINT32_MAX,
        "Number of tokens before any end of sequence or stop token. A grammar may end the completion earlier.",
        0,
        (0,),
    ),
    _flag(_everywhere("ignore_eos"), "ignore_eos", False, "Whether to generate beyond the end of sequence."),
    _flag(_everywhere("skip_special_tokens"), "skip_special_tokens", True, "Whether to omit special tokens from the text."),
    _flag(
        _everywhere("speculative"),
        "speculative",
        True,
        "Whether the server may use speculative decoding. The text is the same either way.",
    ),
    _integer(
        _everywhere("stream_interval"),
        "stream_interval",
        1,
        UINT32_MAX,
        "Number of tokens between two events of a stream. Default: the worker's `--stream-interval`.",
    ),
)

# Number, seeds, lengths and stop rules of the completions of a prompt.
N = _integer(
    _everywhere("n"),
    "",
    1,
    limits.MAX_N,
    "Number of completions per prompt; on `/generate` the same for all prompts.",
    1,
    (1,),
)
BEST_OF = _integer(
    _on((Api.COMPLETION,), "best_of"),
    "",
    1,
    limits.MAX_N,
    "Number of completions generated per prompt. The `n` with the most likely tokens are returned. Default: `n`.",
)
SEED = _integer(_renamed("seed", "sampling_seed"), "seed", *INT64, "Completion *i* samples with seed + *i*. Default: random.")
_LENGTH = "Maximum number of tokens in a completion; the context limits it further"
MAX_NEW_TOKENS = (
    _integer(_on((Api.CHAT,), "max_tokens"), "max_new_tokens", 1, None, f"{_LENGTH}. Default: all that the context allows."),
    _integer(
        _on((Api.COMPLETION,), "max_tokens"),
        "max_new_tokens",
        0,
        None,
        f"{_LENGTH}. 0 needs `echo` and returns only the prompt.",
        COMPLETION_TOKENS,
    ),
    _integer(_on(OPENAI, "max_completion_tokens"), "max_new_tokens", 1, None, "The same as `max_tokens`; used if both are set."),
    _integer(
        _on((Api.GENERATE,), "max_new_tokens"),
        "max_new_tokens",
        0,
        UINT32_MAX,
        f"{_LENGTH}. null: as many as the context allows. 0: the prompt is computed and no token is generated.",
        GENERATE_TOKENS,
    ),
)
STOP = _texts("stop", limits.MAX_STOP_STRINGS, limits.MAX_STOP_STRING_CHARS, "Texts that end the completion.")
STOP_REGEX = _texts(
    "stop_regex",
    limits.MAX_STOP_REGEXES,
    limits.MAX_STOP_REGEX_CHARS,
    "Patterns that end the completion. The match stays in the text.",
)
STOP_TOKEN_IDS = _token_ids("stop_token_ids", limits.MAX_STOP_TOKEN_IDS, "Tokens that end the completion.")
KEPT_STOP = (
    _flag(_on(OPENAI, "include_stop_str_in_output"), "", False, "Whether a matched stop string stays in the text."),
    _flag(_everywhere("no_stop_trim"), "", False, "Whether a matched stop string stays in the text; SGLang's name."),
)

LOGIT_BIAS = SamplingParameter(
    _everywhere("logit_bias"),
    "logit_bias",
    Kind.BIASES,
    "Number to add to the logit of each token id.",
    -100.0,
    100.0,
    most=limits.MAX_LOGIT_BIAS_ENTRIES,
)
ALLOWED_TOKEN_IDS = _token_ids("allowed_token_ids", limits.MAX_TOKEN_ID_SET, "The only tokens that may be sampled.", least=1)
BANNED_TOKEN_IDS = _token_ids("banned_token_ids", limits.MAX_TOKEN_ID_SET, "Tokens that are never sampled.")

DRY_MULTIPLIER = SamplingParameter(
    _everywhere("dry_multiplier"),
    "dry.multiplier",
    Kind.NUMBER,
    "Penalty of a token that continues a repetition: `multiplier * base ** (length - allowed_length)`. 0: no penalty.",
    0.0,
    100.0,
    0.0,
    (0.0,),
)
DRY_BASE = SamplingParameter(_everywhere("dry_base"), "dry.base", Kind.NUMBER, "See `dry_multiplier`.", 1.0, 10.0, 1.75)
DRY_ALLOWED_LENGTH = _integer(
    _everywhere("dry_allowed_length"), "dry.allowed_length", 1, limits.MAX_DRY_ALLOWED_LENGTH, "See `dry_multiplier`.", 2
)
# This is the range in the APIs, where -1 means all tokens and 0 means no penalty. On the wire, a window of 0 means all tokens.
# For -1 the gateway therefore omits the field, and for 0 the whole message Dry (services/gateway/api/generation_params.py).
DRY_PENALTY_LAST_N = _integer(
    _everywhere("dry_penalty_last_n"),
    "dry.window",
    -1,
    limits.MAX_DRY_WINDOW,
    "Number of last tokens that are searched for repetitions. 0: no penalty. -1: all tokens.",
    -1,
    (0,),
)
DRY_SEQUENCE_BREAKERS = SamplingParameter(
    _everywhere("dry_sequence_breakers"),
    "dry.breakers",
    Kind.STRINGS,
    "Texts that end a repetition. Default: line feed, colon, quote, asterisk.",
    least=1,
    most=limits.MAX_DRY_BREAKERS,
    chars=limits.MAX_DRY_BREAKER_CHARS,
)

PARAMETERS = (
    *SCALARS,
    *(N, BEST_OF, SEED, *MAX_NEW_TOKENS),
    *(STOP, STOP_REGEX, STOP_TOKEN_IDS, *KEPT_STOP),
    *(LOGIT_BIAS, ALLOWED_TOKEN_IDS, BANNED_TOKEN_IDS),
    *(DRY_MULTIPLIER, DRY_BASE, DRY_ALLOWED_LENGTH, DRY_PENALTY_LAST_N, DRY_SEQUENCE_BREAKERS),
)
UNSERVED = (
    UnservedParameter("bad_words", OPENAI, ([],)),
    UnservedParameter("custom_logit_processor", OPENAI),
    UnservedParameter("custom_params", tuple(Api)),
    UnservedParameter("early_stopping", OPENAI, (False,)),
    UnservedParameter("guided_whitespace_pattern", OPENAI),
    UnservedParameter("length_penalty", OPENAI, (1, 1.0)),
    UnservedParameter("logits_processors", OPENAI, ([],)),
    UnservedParameter("repetition_detection", OPENAI),
    UnservedParameter("spaces_between_special_tokens", tuple(Api), (True,)),
    UnservedParameter("thinking_token_budget", OPENAI, (-1,)),
    UnservedParameter("typical_p", OPENAI, (1, 1.0)),
    UnservedParameter("use_beam_search", OPENAI, (False,)),
    UnservedParameter("watermarking", OPENAI, (False,)),
)

SCALAR: Mapping[str, SamplingParameter] = MappingProxyType({row.wire: row for row in SCALARS})
_OF_API = {api: MappingProxyType({row.names[api]: row for row in PARAMETERS if api in row.names}) for api in Api}


def of_api(api: Api) -> Mapping[str, SamplingParameter]:
    """Returns the parameters of an API by the API's names, in the order of the table."""
    return _OF_API[api]


def renamed(api: Api) -> Mapping[str, str]:
    """Maps each wire field whose name in the API differs to the name in the API, or to the first one if there are several."""
    rows = [row for row in reversed(PARAMETERS) if api in row.names and row.wire and "." not in row.wire]
    return {row.wire: row.names[api] for row in rows if row.wire != row.names[api]}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The values of the parameters that a request leaves out. The worker determines them, and the gateway adds them to requests.

    There is a field for each row with `of_model`. The defaults of this class are the API's.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all tokens
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def over(self, values: Mapping[str, Any]) -> SamplingDefaults:
        """Returns the defaults with these values replaced. The values must have passed default_fault()."""
        return replace(self, **{name: SCALAR[name].resolved(value) for name, value in values.items()})

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in DEFAULT_NAMES}


API_DEFAULTS = SamplingDefaults()
DEFAULT_NAMES = tuple(field.name for field in fields(SamplingDefaults))


def default_fault(name: str, value: Any) -> str:
    """Returns the fault of a value for a parameter in DEFAULT_NAMES, or "" if the value is valid."""
    return SCALAR[name].fault(value)

"""The sampling parameters: one table of their names, ranges, defaults and neutral values. Pure: plain data, stdlib only.

From it come the gateway's body types, what both ends check, what crosses the wire, the defaults that a model may choose, and
the tables of docs/reference/api.md and docs/reference/sglang-api.md. Numbers of entries and characters are those of
services/shared/limits.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from services.shared import limits
from services.shared.sampling_parameter import Api, Kind, Parameter, UnservedParameter

UINT32_MAX = (1 << 32) - 1
INT64 = (-(1 << 63), (1 << 63) - 1)
COMPLETION_TOKENS = 16  # of an answer, where a request does not say
GENERATE_TOKENS = 128
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
) -> Parameter:
    """off: asks for nothing, and is the default."""
    return Parameter(_everywhere(name), name, Kind.NUMBER, doc, low, high, off, (off,), of_model, excludes_low=excludes_low)


def _integer(
    names: Names,
    wire: str,
    low: int,
    high: int | None,
    doc: str,
    default: int | None = None,
    neutral: tuple[int, ...] = (),
    of_model: bool = False,
) -> Parameter:
    return Parameter(names, wire, Kind.INTEGER, doc, low, high, default, neutral, of_model)


def _flag(names: Names, wire: str, off: bool, doc: str) -> Parameter:
    return Parameter(names, wire, Kind.FLAG, doc, default=off, neutral=(off,))


def _texts(name: str, most: int, chars: int, doc: str) -> Parameter:
    return Parameter(_everywhere(name), name, Kind.TEXTS, doc, most=most, chars=chars)


def _token_ids(name: str, most: int, doc: str, least: int = 0) -> Parameter:
    return Parameter(_everywhere(name), name, Kind.TOKEN_IDS, doc, least=least, most=most)


# They cross the wire as they are, and have the same names in the core.
SCALARS = (
    _number("temperature", 0.0, 100.0, 1.0, "0: always the likeliest token.", of_model=True),
    _number(
        "top_p",
        0.0,
        1.0,
        1.0,
        "The likeliest tokens whose probabilities together reach this share; 0: always the likeliest token.",
        of_model=True,
    ),
    _integer(_everywhere("top_k"), "top_k", -1, 1 << 30, "So many likeliest tokens; 0 or -1: all.", -1, (-1, 0), of_model=True),
    _number("min_p", 0.0, 1.0, 0.0, "Tokens that are so probable, measured by the likeliest one.", of_model=True),
    _number(
        "top_n_sigma",
        0.0,
        1e6,
        0.0,
        "Tokens whose logit lies within *n* standard deviations of the greatest; before `top_k`, `top_p` and `min_p`; 0: all.",
    ),
    _number(
        "repetition_penalty",
        0.0,
        2.0,
        1.0,
        "A factor against tokens of prompt and answer.",
        of_model=True,
        excludes_low=True,
    ),
    _number("frequency_penalty", -2.0, 2.0, 0.0, "Against tokens of the answer, for each time that they are in it."),
    _number("presence_penalty", -2.0, 2.0, 0.0, "Against tokens of the answer."),
    _integer(
        _renamed("min_tokens", "min_new_tokens"),
        "min_new_tokens",
        0,
        UINT32_MAX,
        "No end of sequence and no stop token before so many tokens. A grammar decides that by itself.",
        0,
        (0,),
    ),
    _flag(_everywhere("ignore_eos"), "ignore_eos", False, "The end of sequence does not end the answer."),
    _flag(_everywhere("skip_special_tokens"), "skip_special_tokens", True, "The text is without special tokens."),
    _flag(_everywhere("speculative"), "speculative", True, "false: none of its tokens are guessed ahead; the text is the same."),
    _integer(
        _everywhere("stream_interval"),
        "stream_interval",
        1,
        UINT32_MAX,
        "Tokens between two messages of a stream. Default: the worker's `--stream-interval`.",
    ),
)

# What sets the answers to a prompt apart, and ends them.
N = _integer(_everywhere("n"), "", 1, limits.MAX_N, "Answers to each prompt; on `/generate` the same for all.", 1, (1,))
BEST_OF = _integer(
    _on((Api.COMPLETION,), "best_of"),
    "",
    1,
    limits.MAX_N,
    "So many answers are made to each prompt, of which the `n` with the likeliest tokens come. Default: `n`.",
)
SEED = _integer(_renamed("seed", "sampling_seed"), "seed", *INT64, "Answer *i* samples with seed + *i*. Default: random.")
_LENGTH = "Tokens of an answer at most; never more than the context leaves"
MAX_NEW_TOKENS = (
    _integer(_on((Api.CHAT,), "max_tokens"), "max_new_tokens", 1, None, f"{_LENGTH}, the default."),
    _integer(
        _on((Api.COMPLETION,), "max_tokens"),
        "max_new_tokens",
        0,
        None,
        f"{_LENGTH}. 0, with `echo`: none, the prompt alone.",
        COMPLETION_TOKENS,
    ),
    _integer(_on(OPENAI, "max_completion_tokens"), "max_new_tokens", 1, None, "Goes before `max_tokens`."),
    _integer(
        _on((Api.GENERATE,), "max_new_tokens"),
        "max_new_tokens",
        0,
        UINT32_MAX,
        f"{_LENGTH}; null: that. 0: the prompt is computed and nothing is made.",
        GENERATE_TOKENS,
    ),
)
STOP = _texts("stop", limits.MAX_STOP_STRINGS, limits.MAX_STOP_STRING_CHARS, "Texts that end the answer.")
STOP_REGEX = _texts(
    "stop_regex", limits.MAX_STOP_REGEXES, limits.MAX_STOP_REGEX_CHARS, "Patterns that end the answer, and stay in it."
)
STOP_TOKEN_IDS = _token_ids("stop_token_ids", limits.MAX_STOP_TOKEN_IDS, "Tokens that end the answer.")
KEPT_STOP = (
    _flag(_on(OPENAI, "include_stop_str_in_output"), "", False, "A matched stop string stays in the text."),
    _flag(_everywhere("no_stop_trim"), "", False, "A matched stop string stays in the text: SGLang's name."),
)

LOGIT_BIAS = Parameter(
    _everywhere("logit_bias"),
    "logit_bias",
    Kind.BIASES,
    "Token id → what is added to its logit.",
    -100.0,
    100.0,
    most=limits.MAX_LOGIT_BIAS_ENTRIES,
)
ALLOWED_TOKEN_IDS = _token_ids("allowed_token_ids", limits.MAX_TOKEN_ID_SET, "Nothing but these tokens.", least=1)
BANNED_TOKEN_IDS = _token_ids("banned_token_ids", limits.MAX_TOKEN_ID_SET, "None of these tokens.")

DRY_MULTIPLIER = Parameter(
    _everywhere("dry_multiplier"),
    "dry.multiplier",
    Kind.NUMBER,
    "Against going on with a repetition: `multiplier * base ** (length - allowed_length)`. 0: none.",
    0.0,
    100.0,
    0.0,
    (0.0,),
)
DRY_BASE = Parameter(_everywhere("dry_base"), "dry.base", Kind.NUMBER, "See `dry_multiplier`.", 1.0, 10.0, 1.75)
DRY_ALLOWED_LENGTH = _integer(
    _everywhere("dry_allowed_length"), "dry.allowed_length", 1, limits.MAX_DRY_ALLOWED_LENGTH, "See `dry_multiplier`.", 2
)
# Its values are the APIs'. On the wire and in the core a window of 0 is all: the gateway leaves it out for -1, and sends no Dry
# for 0 (services/gateway/api/sampling_fields.py).
DRY_PENALTY_LAST_N = _integer(
    _everywhere("dry_penalty_last_n"),
    "dry.window",
    -1,
    limits.MAX_DRY_WINDOW,
    "Last tokens that are looked at; 0: no penalty, -1: all.",
    -1,
    (0,),
)
DRY_SEQUENCE_BREAKERS = Parameter(
    _everywhere("dry_sequence_breakers"),
    "dry.breakers",
    Kind.STRINGS,
    "Texts that no repetition runs across. Default: line feed, colon, quote, asterisk.",
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

SCALAR: Mapping[str, Parameter] = MappingProxyType({row.wire: row for row in SCALARS})
_OF_API = {api: MappingProxyType({row.names[api]: row for row in PARAMETERS if api in row.names}) for api in Api}


def of_api(api: Api) -> Mapping[str, Parameter]:
    """The parameters that it takes, by its own names, in the table's order."""
    return _OF_API[api]


def renamed(api: Api) -> Mapping[str, str]:
    """A field of the wire → the API's name, where they differ; of several names the first."""
    rows = [row for row in reversed(PARAMETERS) if api in row.names and row.wire and "." not in row.wire]
    return {row.wire: row.names[api] for row in rows if row.wire != row.names[api]}

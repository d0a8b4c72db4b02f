"""Bodies that a route refuses, 40 per route: first with faults in the route's own fields, then in sampling parameters."""

from __future__ import annotations

from typing import Any

from tests.benchmarks.same_answers.apis import CHAT, COMPLETIONS, GENERATE, MESSAGES, PATHS, RESPONSES, Json, body_of, tool_of
from tests.benchmarks.same_answers.corpus import Case

PER_PATH = 40
REMOVED = object()  # in place of a value: the field is removed from the body

# By field: values that each route with this field refuses. WITHOUT has the fields that a route does not have.
SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": (-0.5, "warm", [], 1e9),
    "top_p": (1.5, -1, "most"),
    "top_k": (-7, 2.5, "few"),
    "min_p": (2, -0.1),
    "frequency_penalty": (9, "much"),
    "presence_penalty": (-9, {}),
    "repetition_penalty": (0, -1),
    "logit_bias": ({"x": 1}, {"999999": 1}, [1]),
    "stop": (7, [1], [""]),
    "stop_token_ids": (["a"], [-3]),
    "stop_regex": ("(", 5),
    "seed": (1.5, "lucky"),
    "n": (0, -2, 100_000),
    "min_tokens": (-1, "two"),
    "dry_multiplier": (-1,),
    "ignore_eos": ("maybe",),
}
RENAMED = {GENERATE: {"seed": "sampling_seed", "min_tokens": "min_new_tokens"}}
WITHOUT = {RESPONSES: {"n", "min_tokens"}, MESSAGES: set(SAMPLING) - {"temperature", "top_p", "top_k"}}

_FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {}}}
OWN: dict[str, list[tuple[str, Any]]] = {
    CHAT: [
        ("model", "nobody"),
        ("messages", REMOVED),
        ("messages", []),
        ("messages", "hello"),
        ("messages", [{"role": "king", "content": "hello"}]),
        ("messages", [{"role": "user"}]),
        ("messages", [{"role": "user", "content": 7}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]),
        ("max_tokens", 0),
        ("max_tokens", "many"),
        ("max_completion_tokens", -4),
        ("top_logprobs", 99),
        ("logprobs", "all"),
        ("stream", "yes please"),
        ("stream_options", 5),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "poem"}),
        ("guided_regex", "("),
        ("guided_grammar", "root ::="),
        ("guided_json", {"type": "nothing"}),
        ("tools", [{"type": "function"}]),
        ("tools", [{**_FUNCTION, "function": {"name": "not a name!"}}]),
        ("tool_choice", {"type": "function", "function": {"name": "missing"}}),
        ("audio", {"voice": "x"}),
        ("session_id", "s"),
    ],
    COMPLETIONS: [
        ("model", "nobody"),
        ("prompt", REMOVED),
        ("prompt", {}),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", [1, "a"]),
        ("prompt", [99_999_999]),
        ("prompt", [-1]),
        ("prompt", [5] * 5000),
        ("max_tokens", -1),
        ("max_tokens", "many"),
        ("logprobs", 99),
        ("logprobs", "all"),
        ("echo", "loud"),
        ("suffix", "and so on"),
        ("priority", "high"),
        ("stream", "yes please"),
        ("response_format", {"type": "json_schema"}),
        ("guided_regex", "("),
        ("guided_choice", []),
        ("guided_json", {"type": "nothing"}),
    ],
    MESSAGES: [
        ("model", "nobody"),
        ("messages", REMOVED),
        ("messages", []),
        ("messages", "hello"),
        ("messages", [{"role": "king", "content": "hello"}]),
        ("messages", [{"role": "user"}]),
        ("messages", [{"role": "user", "content": 7}]),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
        ("messages", [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}]}]),
        ("messages", [{"role": "user", "content": [{"type": "document", "source": {}}]}]),
        ("messages", [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]),
        ("max_tokens", REMOVED),
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("max_tokens", 1.5),
        ("max_tokens", "many"),
        ("system", 7),
        ("system", [{"type": "image"}]),
        ("stop_sequences", "7"),
        ("stop_sequences", [1]),
        ("stop_sequences", [""]),
        ("stream", "yes please"),
        ("output_config", {"format": {"type": "json_schema"}}),
        ("output_config", {"format": {"type": "poem"}}),
        ("output_config", {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}),
        ("output_config", 5),
        ("thinking", {"type": "deep"}),
        ("thinking", "on"),
        ("tools", {}),
        ("tools", [{"description": "no name"}]),
        ("tools", [{"name": "not a name!", "input_schema": {"type": "object"}}]),
        ("tools", [{"name": "f", "input_schema": 7}]),
        ("tool_choice", {"type": "tool", "name": "missing"}),
        ("tool_choice", {"type": "sometimes"}),
        ("mcp_servers", [{"url": "http://x"}]),
        ("container", "c"),
        ("priority", "high"),
    ],
    RESPONSES: [
        ("model", "nobody"),
        ("input", REMOVED),
        ("input", 7),
        ("input", []),
        ("input", [{"role": "king", "content": "hello"}]),
        ("input", [{"type": "unknown_item"}]),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y.png"}]}]),
        ("max_output_tokens", 0),
        ("max_output_tokens", "many"),
        ("instructions", 7),
        ("previous_response_id", "resp_missing"),
        ("conversation", "conv_missing"),
        ("include", ["everything"]),
        ("top_logprobs", 99),
        ("metadata", {"a": 1}),
        ("truncation", "sometimes"),
        ("text", {"format": {"type": "json_schema"}}),
        ("text", {"format": {"type": "poem"}}),
        ("tools", [{"type": "function"}]),
        ("tool_choice", {"type": "function", "name": "missing"}),
        ("stream", "yes please"),
        ("background", "later"),
    ],
    GENERATE: [
        ("text", REMOVED),
        ("text", 7),
        ("text", []),
        ("input_ids", [1, 2]),
        ("sampling_params", 5),
        ("sampling_params", {"max_new_tokens": -1}),
        ("sampling_params", {"max_new_tokens": "many"}),
        ("sampling_params", {"regex": "("}),
        ("sampling_params", {"ebnf": "root ::="}),
        ("sampling_params", {"json_schema": "{"}),
        ("sampling_params", {"json_schema": '{"type": "nothing"}'}),
        ("sampling_params", {"regex": "a", "ebnf": 'root ::= "a"'}),
        ("sampling_params", {"unknown_parameter": 1}),
        ("top_logprobs_num", "x"),
        ("return_logprob", "all"),
        ("logprob_start_len", 999),
        ("stream", "yes please"),
        ("image_data", "http://x/y.png"),
        ("unknown_field", 1),
        ("model", "nobody"),
    ],
}


def refused_cases(path: str) -> list[Case]:
    """Returns PER_PATH bodies, first those with faults in the route's own fields. Every fifth body asks for a stream."""
    bodies = [_with(path, field, value) for field, value in OWN[path]]
    bodies += [_with_sampling(path, field, value) for field, value in _sampling_faults(path)]
    bodies = bodies[:PER_PATH]
    assert len(bodies) == PER_PATH, "every route must have PER_PATH refused bodies"
    return [Case("refused", path, {"stream": True, **body} if number % 5 == 4 else body) for number, body in enumerate(bodies)]


def all_refused_cases() -> list[Case]:
    return [case for path in PATHS for case in refused_cases(path)]


def _sampling_faults(path: str) -> list[tuple[str, Any]]:
    """Returns (field, bad value) pairs: first one value of each field, then a second one. So a shortened list has every field."""
    fields = {field: values for field, values in SAMPLING.items() if field not in WITHOUT.get(path, set())}
    names = RENAMED.get(path, {})
    most = max(len(values) for values in fields.values())
    return [
        (names.get(field, field), values[index])
        for index in range(most)
        for field, values in fields.items()
        if index < len(values)
    ]


def _with(path: str, field: str, value: Any) -> Json:
    body = body_of(path, "hello", 4)
    if field == "tool_choice":
        body["tools"] = [tool_of(path, "present", "Gets a value.", "value")]
    if field == "logprob_start_len":
        body["return_logprob"] = True
    if value is REMOVED:
        return {name: given for name, given in body.items() if name != field}
    return {**body, field: value}


def _with_sampling(path: str, field: str, value: Any) -> Json:
    body = body_of(path, "hello", 4)
    if path != GENERATE:
        return {**body, field: value}
    return {**body, "sampling_params": {**body["sampling_params"], field: value}}

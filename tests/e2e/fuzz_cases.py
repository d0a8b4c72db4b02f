"""Hypothesis strategies for random requests: valid, nearly valid and broken ones, from the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from hypothesis import strategies as st
from schemathesis import GenerationMode, openapi
from schemathesis.core import NotSet

from tests.e2e.fuzz_bytes import HOSTILE, broken, cut_or_spoilt, dumped, spoil

MODEL, FORM = "demo", "multipart/form-data"
USER = [{"role": "user", "content": "Hi"}]
SESSION, RID = st.sampled_from(["s0", "s1", "s2"]), st.sampled_from(["r0", "r1", "r2"])
BASES: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": USER, "max_tokens": 4},
    "/v1/completions": {"model": MODEL, "prompt": "Hi", "max_tokens": 4},
    "/v1/embeddings": {"model": MODEL, "input": "Hi"},
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 4}},
    "/encode": {"text": "Hi"},
    "/v1/score": {"query": "Hi", "items": ["a"], "label_token_ids": [5]},
    "/score": {"query": "Hi", "items": ["a"], "label_token_ids": [5]},
    "/abort_request": {"rid": "r0"},
    "/open_session": {"capacity_of_str_len": 64, "session_id": "s0", "timeout": 2.0},
    "/close_session": {"session_id": "s0"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5]},
    "/parse_function_call": {"text": "Hi", "tools": [], "tool_call_parser": "hermes"},
    "/separate_reasoning": {"text": "<think>a</think>b", "reasoning_parser": "think"},
    "/v1/messages": {"model": MODEL, "messages": USER, "max_tokens": 4},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": USER},
    "/v1/responses": {"model": MODEL, "input": "Hi", "max_output_tokens": 4},
    "/v1/responses/input_tokens": {"model": MODEL, "input": "Hi"},
    "/v1/conversations": {"items": []},
    "/v1/conversations/{conversation_id}": {"metadata": {}},
    "/v1/conversations/{conversation_id}/items": {"items": []},
    "/v1/batches": {"input_file_id": "file-a", "endpoint": "/v1/completions", "completion_window": "24h"},
}
PARAMETERS = {
    "model_id": MODEL,
    "response_id": "resp_a",
    "conversation_id": "conv_a",
    "item_id": "msg_a",
    "file_id": "file-a",
    "batch_id": "batch_a",
}
ITEMS = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant"]), "content": st.text(max_size=20)}),
        st.fixed_dictionaries({"type": st.just("function_call_output"), "call_id": st.just("a"), "output": st.text(max_size=9)}),
        st.fixed_dictionaries({"type": st.just("item_reference"), "id": st.just("msg_a")}),
    ),
    max_size=3,
)
TEXTS = st.one_of(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=3))
IDS = st.lists(st.integers(0, 1279), min_size=1, max_size=9)
PROMPTS = st.one_of(TEXTS, IDS, st.lists(IDS, min_size=1, max_size=3))
GRAMMARS = st.sampled_from(["[a-c]{1,4}", "(yes|no)", "a**", "(", "\\p{L}+", 'root ::= "a" | "b"', "root ::= root", "a{1000000}"])
SCHEMAS = st.sampled_from(
    [
        *(
            {"type": "object"},
            {"enum": [1, "a", None]},
            {"type": "array", "items": {"type": "integer"}},
            True,
            False,
            {"$ref": "#"},
        ),
        *(
            '{"type": "string", "maxLength": 3}',
            {"type": "strnig"},
            {"minimum": 3},
            {"pattern": "("},
            {"allOf": [{}, {"not": {}}]},
        ),
    ]
)
BY_HAND: Mapping[
    str, st.SearchStrategy[Any]
] = {  # strategies for fields whose schema allows mostly values that the gateway refuses
    "model": st.just(MODEL),
    "messages": st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": st.text(max_size=20)}), min_size=1
    ),
    "prompt": PROMPTS,
    "input": st.one_of(PROMPTS, ITEMS),
    "items": ITEMS,
    "metadata": st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=2),
    "max_output_tokens": st.integers(1, 12),
    "text": TEXTS,
    "input_ids": st.one_of(IDS, st.lists(IDS, min_size=1, max_size=3)),
    "rid": RID,
    "request_id": RID,
    "session_id": SESSION,
    "session_params": st.fixed_dictionaries({"id": SESSION}, optional={"rid": RID, "replace": st.booleans()}),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
    "n": st.integers(1, 3),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_new_tokens"), st.integers(1, 12)),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids", "banned_token_ids", "logprob_token_ids", "token_ids_logprob"), IDS),
    **dict.fromkeys(("guided_json", "json_schema"), SCHEMAS),
    **dict.fromkeys(("guided_regex", "regex", "guided_grammar", "ebnf", "stop_regex"), GRAMMARS),
    "response_format": SCHEMAS.map(lambda schema: {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}),
    "structured_outputs": st.one_of(SCHEMAS.map(lambda schema: {"json": schema}), GRAMMARS.map(lambda text: {"regex": text})),
    "logit_bias": st.dictionaries(st.integers(0, 1279).map(str), st.floats(-100, 100), max_size=3),
}
LATIN = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=40).map(str.strip)
HEADERS = st.sampled_from(
    ["content-type", "accept", "x-request-id", "x-smg-routing-key", "authorization", "x-api-key", "origin", "traceparent", "x-a"]
)
VALUES = st.one_of(
    LATIN,
    st.sampled_from(
        ["application/json", "text/plain", "text/event-stream", "multipart/form-data", "Bearer", "Bearer a", "*/*", "null"]
    ),
    st.just("x" * 5000),
)
METHODS = st.sampled_from(["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "TRACE", "PROPFIND", "BREW"])


@dataclass(frozen=True)
class Sent:
    """A random request."""

    method: str
    target: str  # path and query, quoted
    headers: tuple[tuple[str, str], ...]
    body: bytes | None  # None: the request has no body
    stays: bool = True  # False: the client disconnects without reading the response


STAYS = st.sampled_from([True] * 9 + [False])


class Cases:
    """Strategies for requests to all paths of the gateway's OpenAPI document."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document
        self._schema = openapi.from_dict(dict(document))
        self._fields = openapi.from_dict(self._document_of_fields())
        self._values: dict[tuple[str, str, GenerationMode], st.SearchStrategy[Any]] = {}

    @property
    def posts(self) -> list[str]:
        return [path for path, item in self._document["paths"].items() if "requestBody" in item.get("post", {})]

    def requests(self, path: str) -> st.SearchStrategy[Sent]:
        """Generates POST requests to the path."""
        if FORM in self._document["paths"][path]["post"]["requestBody"]["content"]:
            return self._forms(path)
        nearly = st.builds(Sent, st.just("POST"), st.just(_filled(path)), self.headers(), self._bodies(path), STAYS)
        whole = [self._whole(path, mode) for mode in GenerationMode]
        return st.one_of(nearly, nearly, nearly, nearly, *whole)

    def _forms(self, path: str) -> st.SearchStrategy[Sent]:
        """Generates multipart forms: valid ones, ones with unknown fields, and broken ones."""
        field = "--x\r\ncontent-disposition: form-data; name={}\r\n\r\n{}\r\n".format
        names = st.sampled_from(['"purpose"', '"file"', '"file"; filename="a"', '"expires_after[seconds]"', "a", '"a'])
        values = st.one_of(st.sampled_from(["batch", "3600", "--x", "--x--"]), st.text(max_size=20))
        fields = st.lists(st.builds(field, names, values), max_size=4).map("".join)
        right = st.builds(field, st.just('"file"; filename="a"'), st.text(min_size=1, max_size=40)).map(
            field('"purpose"', "batch").__add__
        )
        forms = st.one_of(right, right, fields).map(lambda parts: f"{parts}--x--".encode(errors="surrogatepass"))
        bodies = st.one_of(forms, forms, forms.flatmap(cut_or_spoilt))
        types = st.sampled_from([f"{FORM}; boundary=x"] * 4 + [FORM, f"{FORM}; boundary=y"])
        return st.builds(Sent, st.just("POST"), st.just(path), types.map(lambda kind: (("content-type", kind),)), bodies, STAYS)

    def headers(self) -> st.SearchStrategy[tuple[tuple[str, str], ...]]:
        return st.one_of(st.just(()), st.lists(st.tuples(HEADERS, VALUES), max_size=3, unique_by=lambda each: each[0]).map(tuple))

    def elsewhere(self) -> st.SearchStrategy[Sent]:
        """Generates requests with any method to any path, existing or not."""
        known = st.sampled_from(list(map(_filled, self._document["paths"])))
        text = st.text(st.characters(exclude_categories=("Cs",)), max_size=12).map(quote)
        paths = st.one_of(known, st.builds(str.__add__, known, text), text.map("/".__add__))
        targets = st.one_of(paths, st.builds("{}?{}".format, paths, text))
        body = st.one_of(st.none(), st.binary(max_size=40))
        return st.builds(Sent, METHODS, targets, self.headers(), body)

    def _whole(self, path: str, mode: GenerationMode) -> st.SearchStrategy[Sent]:
        """Generates requests by schemathesis. They follow the schema if the mode is POSITIVE, and break it otherwise."""

        def sent(case: Any) -> Sent:
            headers = tuple((name, value) for name, value in (case.headers or {}).items() if _is_sane(str(value)))
            body = None if isinstance(case.body, NotSet) else case.body if isinstance(case.body, bytes) else dumped(case.body)
            return Sent("POST", _filled(path), headers, body)

        return self._schema[path]["POST"].as_strategy(generation_mode=mode).map(sent)

    def _bodies(self, path: str) -> st.SearchStrategy[bytes]:
        """Generates bodies from a minimal valid body, with random members, changed values or broken bytes."""
        name = self._document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = name.rpartition("/")[2]
        good, bad = (self._drawn(path, schema, mode) for mode in GenerationMode)
        spoilt = st.builds(spoil, good, st.lists(st.tuples(st.integers(0, 30), st.sampled_from(HOSTILE)), min_size=1, max_size=2))
        return st.one_of(*[good.map(dumped)] * 3, bad.map(dumped), spoilt.map(dumped), good.map(dumped).flatmap(broken))

    def _drawn(self, path: str, schema: str, mode: GenerationMode) -> st.SearchStrategy[dict[str, Any]]:
        base = BASES[path]
        without_text = {name: value for name, value in base.items() if name != "text"}
        drawn = self._members(schema, mode).map(lambda given: (without_text if given.get("input_ids") else base) | given)
        if path != "/generate":
            return drawn
        sampling = self._members("NativeSampling", mode).map(BASES[path]["sampling_params"].__or__)
        return st.builds(lambda body, given: {**body, "sampling_params": given}, drawn, sampling)

    def _members(self, schema: str, mode: GenerationMode) -> st.SearchStrategy[dict[str, Any]]:
        names = sorted(self._document["components"]["schemas"][schema]["properties"])
        chosen = st.lists(st.sampled_from(names), max_size=4, unique=True)
        return chosen.flatmap(lambda found: st.fixed_dictionaries({name: self._value(schema, name, mode) for name in found}))

    def _value(self, schema: str, name: str, mode: GenerationMode) -> st.SearchStrategy[Any]:
        if mode is GenerationMode.POSITIVE and name in BY_HAND:
            return BY_HAND[name]
        key = (schema, name, mode)
        if key not in self._values:
            drawn = self._fields[f"/{schema}/{name}"]["POST"].as_strategy(generation_mode=mode)
            self._values[key] = drawn.map(lambda case: _member(case.body, name))
        return self._values[key]

    def _document_of_fields(self) -> dict[str, Any]:
        """Returns an OpenAPI document with one operation per member of each body. The operation's body has only this member."""
        paths: dict[str, Any] = {}
        for schema, definition in self._document["components"]["schemas"].items():
            for name, value in definition.get("properties", {}).items():
                alone = {"type": "object", "properties": {name: value}, "required": [name], "additionalProperties": False}
                content = {"application/json": {"schema": alone}}
                operation = {"requestBody": {"required": True, "content": content}, "responses": {"200": {"description": "All."}}}
                paths[f"/{schema}/{name}"] = {"post": operation}
        return {**self._document, "paths": paths}


def _filled(path: str) -> str:
    for name, value in PARAMETERS.items():
        path = path.replace(f"{{{name}}}", value)
    return path


def _member(body: Any, name: str) -> Any:
    """Returns the member `name` of an object that has it, None for bytes or an absent body, and any other body as a whole."""
    return body[name] if isinstance(body, dict) and name in body else None if isinstance(body, bytes | NotSet) else body


def _is_sane(value: str) -> bool:
    return all(32 <= ord(char) < 256 and char != "\x7f" for char in value) and value == value.strip()

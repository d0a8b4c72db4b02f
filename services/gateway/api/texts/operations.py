"""Describes the operations that tokenize and parse texts or report the gateway's state, for the OpenAPI document."""

from __future__ import annotations

from rootstock_llm.services.gateway.api.document.operation import JSON, ApiOperation
from rootstock_llm.services.gateway.api.texts.types import (
    DetokenizedText,
    DetokenizeRequest,
    ParseCallRequest,
    ParsedCalls,
    Separated,
    SeparateRequest,
    ServerInfo,
    TokenizeRequest,
    Tokens,
    Version,
    WorkerLoad,
)

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
PARSE_CALL, SEPARATE = "/parse_function_call", "/separate_reasoning"
PING, VERSION, LOAD = "/ping", "/version", "/get_load"
SERVER_INFO = ("/get_server_info", "/server_info")
RANKING = ("/classify", "/v1/rerank", "/rerank")

_TAG = "SGLang"
_TOKENIZER_STATUSES = (404, 504)
OPERATIONS = (
    ApiOperation(
        "post",
        TOKENIZE,
        _TAG,
        "Tokenize texts",
        {JSON: Tokens},
        TokenizeRequest,
        _TOKENIZER_STATUSES,
        example={"prompt": "Count from 3 to 9."},
    ),
    ApiOperation(
        "post",
        DETOKENIZE,
        _TAG,
        "Detokenize token ids",
        {JSON: DetokenizedText},
        DetokenizeRequest,
        (404,),
        example={"tokens": [72, 105]},
    ),
    ApiOperation(
        "post",
        PARSE_CALL,
        _TAG,
        "Parse the tool calls of an output",
        {JSON: ParsedCalls},
        ParseCallRequest,
        example={
            "text": '<tool_call>\n{"name": "get_mayor", "arguments": {"city": "Lima"}}\n</tool_call>',
            "tools": [{"type": "function", "function": {"name": "get_mayor"}}],
            "tool_call_parser": "hermes",
        },
    ),
    ApiOperation(
        "post",
        SEPARATE,
        _TAG,
        "Separate the reasoning of an output",
        {JSON: Separated},
        SeparateRequest,
        example={"text": "<think>17 + 25 = 42</think>The sum is 42.", "reasoning_parser": "think"},
    ),
    ApiOperation("get", PING, _TAG, "Liveness", {}, statuses=(503,), requires_key=False),
    ApiOperation("get", VERSION, _TAG, "The gateway's version", {JSON: Version}, statuses=(503,)),
    ApiOperation("get", LOAD, _TAG, "Load of each worker", {JSON: list[WorkerLoad]}, statuses=(503,)),
    *(
        ApiOperation("get", path, _TAG, "Models, workers and state of the gateway", {JSON: ServerInfo}, statuses=(503,))
        for path in SERVER_INFO
    ),
    *(ApiOperation("post", path, _TAG, "Not supported yet", {}, statuses=(503,), served=False) for path in RANKING),
)

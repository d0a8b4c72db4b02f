"""Describes the operations of SGLang's API, for the OpenAPI document."""

from __future__ import annotations

from rootstock_llm.services.gateway.api.document.operation import EVENTS, JSON, ApiOperation
from rootstock_llm.services.gateway.api.sglang.answers import (
    AbortResult,
    EncodeAnswers,
    GenerateAnswers,
    GenerateEvent,
    ModelDescription,
    Scoring,
    SessionId,
)
from rootstock_llm.services.gateway.api.sglang.types import (
    AbortRequest,
    CloseSessionRequest,
    NativeEncodeRequest,
    NativeGenerateRequest,
    NativeSampling,
    OpenSessionRequest,
    ScoreRequest,
)

GENERATE = "/generate"
ENCODE = "/encode"
SCORE = ("/v1/score", "/score")
ABORT = "/abort_request"
OPEN_SESSION = "/open_session"
CLOSE_SESSION = "/close_session"
HEALTH_GENERATE = "/health_generate"
MODEL_INFO = ("/get_model_info", "/model_info")

_TAG = "SGLang"
_GENERATED = {JSON: GenerateAnswers, EVENTS: GenerateEvent}
OPERATIONS = (
    *(
        ApiOperation(
            method,
            GENERATE,
            _TAG,
            "Continue texts or token ids",
            _GENERATED,
            NativeGenerateRequest,
            generates=True,
            referenced_types=(NativeSampling,),
            example={"text": "Count from 3 to 9.", "sampling_params": {"max_new_tokens": 32, "temperature": 0}},
        )
        for method in ("post", "put")
    ),
    ApiOperation(
        "post",
        ENCODE,
        _TAG,
        "Embed texts or token ids",
        {JSON: EncodeAnswers},
        NativeEncodeRequest,
        generates=True,
        example={"text": ["What is 17 + 25?", "Count from 3 to 9."]},
    ),
    *(
        ApiOperation(
            "post",
            path,
            _TAG,
            "Score items with a query",
            {JSON: Scoring},
            ScoreRequest,
            generates=True,
            example={
                "query": "Is this a number?",
                "items": ["42", "blue"],
                "label_token_ids": [10, 20],
                "apply_softmax": True,
            },
        )
        for path in SCORE
    ),
    ApiOperation(
        "post", ABORT, _TAG, "Abort requests by rid", {JSON: AbortResult}, AbortRequest, (403,), example={"rid": "a-request"}
    ),
    ApiOperation(
        "post",
        OPEN_SESSION,
        _TAG,
        "Open a session",
        {JSON: SessionId},
        OpenSessionRequest,
        (404, 504),
        example={"session_id": "a-session", "capacity_of_str_len": 1000},
    ),
    ApiOperation(
        "post", CLOSE_SESSION, _TAG, "Close a session", {}, CloseSessionRequest, (404, 504), example={"session_id": "a-session"}
    ),
    ApiOperation("get", HEALTH_GENERATE, _TAG, "Check that a token can be generated", {}, statuses=(503,), requires_key=False),
    *(
        ApiOperation(
            "get",
            path,
            _TAG,
            "Get the model that requests without a model name use",
            {JSON: ModelDescription},
            statuses=(403, 503),
        )
        for path in MODEL_INFO
    ),
)

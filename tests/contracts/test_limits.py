"""Every limit of services/shared/limits.py has a test: one of two tests that iterate over all limits, or a test in ELSEWHERE."""

from __future__ import annotations

from pathlib import Path

from rootstock_llm.services.shared import limits
from tests.services.gateway.api import test_limits_walked as over_http
from tests.services.worker.front import test_limits_walked as over_grpc

ROOT = Path(__file__).resolve().parents[2]
NAMES = [name for name in vars(limits) if name.isupper()]
GATEWAY, KEYS = "tests/services/gateway/", "tests/services/gateway/keys/test_key_table.py"
BODIES, LONG = GATEWAY + "http/test_body_budget.py", "tests/services/tokenizer/test_long_requests.py"
SIZES = "tests/services/shared/test_json_schema.py"
# Limits that neither of the two tests covers → file of their test, and a text in this file.
ELSEWHERE = {
    "MAX_LOGPROB_VALUES": (GATEWAY + "api/test_limits_of_a_request.py", "MAX_LOGPROB_VALUES"),
    "MAX_REPEATED_LOGPROB_VALUES": (
        GATEWAY + "api/test_limits_of_a_request.py",
        "test_cumulative_stream_has_a_lower_limit_of_logprob_values",
    ),
    "MAX_ROUTED_EXPERT_IDS": (GATEWAY + "api/test_routed_experts.py", "MAX_ROUTED_EXPERT_IDS"),
    "MAX_REQUEST_SET_IDS": (GATEWAY + "api/test_limits_of_a_request.py", "MAX_REQUEST_SET_IDS"),
    "MAX_SCORE_TOKENS": (GATEWAY + "api/test_score.py", "MAX_SCORE_TOKENS"),
    "MAX_TOKEN_TEXTS": ("tests/services/detokenizer/test_server.py", "MAX_TOKEN_TEXTS"),
    "MAX_HEAD_BYTES": (GATEWAY + "http/test_connection.py", "MAX_HEAD_BYTES"),
    "MAX_HEAD_SECONDS": (GATEWAY + "http/test_connection.py", "head_s"),
    "MAX_BODY_BYTES": (GATEWAY + "api/test_bad_input.py", "max_body_bytes"),
    "MAX_MESSAGE_BYTES": (GATEWAY + "remote/test_worker_link.py", "MAX_MESSAGE_BYTES"),
    "MAX_RENDERED_CHARS": ("tests/services/tokenizer/test_render_child.py", "max_chars"),
    "MAX_TEMPLATE_SECONDS": ("tests/services/tokenizer/test_server.py", "test_hostile_template_does_not_stop_other_requests"),
    **dict.fromkeys((name for name in NAMES if "KEY" in name and "ROUTING" not in name), (KEYS, "limits.MAX_KEYS")),
    "MAX_SECRETS_OF_A_KEY": (KEYS, "MAX_SECRETS_OF_A_KEY"),
    "MAX_MODELS_OF_A_KEY": (KEYS, "MAX_MODELS_OF_A_KEY"),
    "MAX_MODEL_NAME_CHARS": (KEYS, "MAX_MODEL_NAME_CHARS"),
    "SMALL_BODY_BYTES": (BODIES, "test_body_budget_admits_small_bodies_while_a_large_body_waits"),
    "SMALL_BODY_POOL_BYTES": (BODIES, "test_body_budget_admits_small_bodies_while_a_large_body_waits"),
    "MAX_JSON_DEPTH": (GATEWAY + "api/test_bad_input.py", "MAX_JSON_DEPTH"),
    **dict.fromkeys(("MAX_JSON_VALUES", "JSON_VALUE_BYTES"), (BODIES, "MAX_JSON_VALUES")),
    "BODY_STEP_BYTES": (BODIES, "test_body_reserves_bytes_in_steps_when_the_size_of_the_body_is_unknown"),
    "MAX_WAITING_BODIES": (
        GATEWAY + "http/test_body_pool.py",
        "test_pool_refuses_a_body_when_all_other_bytes_belong_to_waiting_bodies",
    ),
    **dict.fromkeys(
        ("MAX_ENCODING_BYTES", "MAX_ENCODING_WAIT_S"), (LONG, "test_long_request_is_refused_when_the_budget_stays_full")
    ),
    **dict.fromkeys(
        ("SHORT_ENCODING_BYTES", "MAX_OPEN_ENCODINGS", "HUGE_ENCODING_BYTES"),
        (GATEWAY + "remote/test_encode_stream.py", "MAX_OPEN_ENCODINGS"),
    ),
    "MAX_KEPT_TOKENS": ("tests/services/detokenizer/test_session.py", "MAX_KEPT_TOKENS"),
    **dict.fromkeys(("MAX_TOOLS", "MAX_TOOL_NAME_CHARS", "MAX_CALLS"), (GATEWAY + "api/test_tools.py", "MAX_CALLS")),
    **dict.fromkeys(
        ("MAX_STORED_ID_CHARS", "MAX_METADATA", "MAX_METADATA_NAME_CHARS", "MAX_METADATA_CHARS"),
        (GATEWAY + "api/test_responses.py", "MAX_METADATA + 1"),
    ),
    **dict.fromkeys(
        ("MAX_RESPONSE_CHAIN", "MAX_CHAIN_BYTES", "MAX_CONVERSATION_ITEMS"),
        (GATEWAY + "api/test_responses.py", "MAX_CHAIN_BYTES"),
    ),
    **dict.fromkeys(
        ("MAX_BACKGROUND_BYTES", "MAX_BACKGROUND_STREAMS", "MAX_OWN_BACKGROUND_STREAMS"),
        (GATEWAY + "api/test_background.py", "MAX_OWN_BACKGROUND_STREAMS"),
    ),
    "MAX_RECORD_BYTES": (GATEWAY + "store/test_redis_store.py", "MAX_RECORD_BYTES + 1"),
    **dict.fromkeys(
        ("MAX_BATCH_LINES", "MAX_BATCH_LINE_BYTES", "MAX_BATCH_ERRORS", "MAX_CUSTOM_ID_CHARS"),
        (GATEWAY + "batches/test_input_lines.py", "MAX_BATCH_LINES + 1"),
    ),
    **dict.fromkeys(
        ("MAX_FILE_BYTES", "MAX_FILE_NAME_CHARS", "FILE_CHUNK_BYTES", "MAX_FORM_HEAD_BYTES", "MAX_FORM_PARTS"),
        (GATEWAY + "api/test_uploads.py", "MAX_FORM_HEAD_BYTES + 1"),
    ),
    **dict.fromkeys(
        (name for name in NAMES if "STAGING" in name or "NIXL" in name),
        ("tests/exec/remote_kv/test_nixl.py", "MAX_STAGING_SLOTS + 1"),
    ),
    "MAX_CORPUS_BYTES": ("tests/services/worker/test_draft_corpus.py", "MAX_CORPUS_BYTES"),
    "MAX_BATCH_WINDOW_S": (GATEWAY + "api/test_batches.py", "longer than the longest completion_window"),
    "MAX_BATCH_RESULT_BYTES": (GATEWAY + "batches/test_line_results.py", "MAX_BATCH_RESULT_BYTES + 1"),
    "MAX_WORD_CHARS": (
        "tests/services/tokenizer/test_encoding_pieces.py",
        "test_piece_encoder_refuses_an_uncuttable_text_above_max_word_chars",
    ),
    "MAX_CALL_DEPTH": (GATEWAY + "output/test_odd_outputs.py", "MAX_CALL_DEPTH"),
    "MAX_HELD_CALL_CHARS": (GATEWAY + "output/test_odd_outputs.py", "MAX_HELD_CALL_CHARS"),
    **dict.fromkeys((name for name in NAMES if "SCHEMA" in name or "OPTIONAL" in name), (SIZES, "MAX_SCHEMA")),
}


def test_every_limit_has_a_test() -> None:
    walked = over_http.WALKED.keys() | over_grpc.WALKED.keys()
    assert set(NAMES) == walked | ELSEWHERE.keys() and not walked & ELSEWHERE.keys()


def test_tests_listed_in_elsewhere_exist() -> None:
    assert not [name for name, (path, word) in ELSEWHERE.items() if word not in (ROOT / path).read_text()]

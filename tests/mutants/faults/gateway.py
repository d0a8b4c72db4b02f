"""Of the gateway, and of what it refuses at the worker."""

from __future__ import annotations

from tests.mutants.fault import of

GATEWAY = (
    *of(
        "gateway",
        "services/gateway/api/request_body.py",
        ("return Field(absent, ge=row.low, le=row.high,", "return Field(absent, le=row.high,"),
        ("ge=row.low, le=row.high, description=row.doc)", "ge=row.low, description=row.doc)"),
        ("max_length=row.most, description=row.doc)", "description=row.doc)"),
    ),
    *of(
        "gateway",
        "services/gateway/api/openai/types.py",
        (
            "class CompletionRequest(GenerationBody):\n",
            "class CompletionRequest(GenerationBody):\n    top_k: int | None = None\n",
        ),
    ),
    *of(
        "gateway",
        "services/gateway/api/sampling_fields.py",
        ("if any(not 1 <= len(item) <= row.chars", "if any(not len(item) <= row.chars"),
        ("if min(ids) < 0 or", "if"),
        only="test_bad_input",
    ),
    *of(
        "gateway",
        "services/gateway/api/translation.py",
        ("(STOP_TOKEN_IDS, ALLOWED_TOKEN_IDS, BANNED_TOKEN_IDS):", "(STOP_TOKEN_IDS, ALLOWED_TOKEN_IDS):"),
        only="test_bad_input",
    ),
    *of(
        "gateway",
        "services/gateway/api/constraints.py",
        ("if not isinstance(schema, dict | bool):", "if not isinstance(schema, dict | bool | list):"),
        ('"guided_grammar": ebnf,', '"guided_grammar": regex,'),
    ),
    *of(
        "gateway",
        "services/gateway/routing/filters.py",
        ("if not ask.lora:", "if True:"),
        only="test_routing_policies",
    ),
    *of(
        "gateway",
        "services/worker/front/sampling_wire.py",
        ("    if wrong := row.fault(value):", "    if (wrong := row.fault(value)) and not name:"),
        ("_listed_ids(message, table.BANNED_TOKEN_IDS, model)", "_listed_ids(message, table.ALLOWED_TOKEN_IDS, model)"),
        only="test_wire_submit",
    ),
    *of(
        "gateway",
        "services/shared/sampling_parameter.py",
        ("and (high is None or value <= high):", ":"),
        only="test_bad_input",
    ),
    *of(
        "gateway",
        "services/gateway/api/sampling_fields.py",
        ("max(ids) >= vocab_size", "max(ids) > vocab_size"),
        ("len(texts) > row.most:", "len(texts) > row.most + 1:"),
    ),
    *of("gateway", "services/gateway/api/constraints.py", ("if len(found) > 1:", "if len(found) > 2:")),
    *of(
        "gateway",
        "services/gateway/api/constraints.py",
        ("if len(value) > limits.MAX_GUIDED_CHOICES:", "if len(value) > limits.MAX_GUIDED_CHOICES + 1:"),
        only="test_bad_input",
    ),
    *of(
        "gateway",
        "services/gateway/api/constraints.py",
        (
            "if len(text) > limits.MAX_GRAMMAR_BYTES or len(text.encode()) > limits",
            "if len(text) > limits.MAX_GRAMMAR_BYTES + 1 or len(text.encode()) > 1 + limits",
        ),
        only="gateway/api/test_limits_walked",
    ),
    *of(
        "gateway",
        "services/gateway/api/request_body.py",
        ('le=INT32[1], description="Default 0.', 'le=INT32[1] + 1, description="Default 0.'),
        ("None, max_length=limits.MAX_ROUTING_KEY_CHARS,", "None, max_length=limits.MAX_ROUTING_KEY_CHARS + 1,"),
        only="gateway/api/test_limits_walked",
    ),
    *of(
        "gateway",
        "services/gateway/api/request_body.py",
        ("stop_token_ids: list[int] | None", "stop_token_ids: list[int | str] | None"),
        ("min_length=row.least or None, max_length", "max_length"),
        only="contracts/test_sampling_parameters",
    ),
    *of(
        "gateway",
        "services/gateway/api/openai/types.py",
        ("max_length=limits.MAX_LOGPROB_TOKEN_IDS,", "max_length=limits.MAX_LOGPROB_TOKEN_IDS + 1,"),
        (
            'None, ge=0, le=limits.MAX_TOP_LOGPROBS, description="Of',
            'None, ge=0, le=limits.MAX_TOP_LOGPROBS + 1, description="Of',
        ),
        only="gateway/api/test_limits_walked",
    ),
    *of(
        "gateway",
        "services/gateway/api/sampling_fields.py",
        ("return _texts(value, table.STOP_REGEX)", "return _texts(value, table.STOP)"),
        only="gateway/api/test_limits_walked",
    ),
    *of(
        "gateway",
        "services/gateway/api/prompts.py",
        ("if len(prompts) > limits.MAX_BATCH_PROMPTS:", "if len(prompts) > limits.MAX_BATCH_PROMPTS + 1:"),
        only="gateway/api/test_limits_walked",
    ),
    *of(
        "gateway",
        "services/gateway/api/known_fields.py",
        ('"suffix": ("",),', ""),
        only="test_known_fields",
    ),
    *of(
        "gateway",
        "services/gateway/api/known_fields.py",
        ('"return_bytes": (False,),', '"return_bytes": (),'),
        only="test_sglang_clients",
    ),
    *of(
        "gateway",
        "services/worker/front/sampling_wire.py",
        ("if not 0 < len(text) <= row.chars:", "if not 0 < len(text) <= row.chars + 1:"),
        ("within(len(ids), most, field)", "within(len(ids) - 1, most, field)"),
        ("within(message.logprobs.top, limits.MAX_TOP_LOGPROBS,", "within(message.logprobs.top, limits.MAX_TOP_LOGPROBS + 1,"),
        ("limits.MAX_LOGPROB_TOKEN_IDS, model,", "limits.MAX_LOGPROB_TOKEN_IDS + 1, model,"),
        only="worker/front/test_limits_walked",
    ),
    *of(
        "gateway",
        "services/worker/front/sampling_wire.py",
        ("if ids and max(ids) >= model.vocab_size:", "if ids and max(ids) > model.vocab_size:"),
        ("return row.resolved(value)", "return value"),
        only="test_wire_submit",
    ),
    *of(
        "gateway",
        "services/gateway/discovery/targets.py",
        ("1 <= number <= 65535", "1 <= number <= 65536"),
        ("len(port) <= 15", "len(port) <= 30"),
        only="test_discovery",
    ),
    *of(
        "gateway",
        "services/gateway/admin/operations.py",
        ('("GET", "/get_server_info"): _STATE', '("GET", "/get_server_info"): _LOAD'),
        only="test_admin",
    ),
    *of(
        "gateway",
        "services/gateway/api/openai/validation.py",
        ("if most == 0 and not request.echo:", "if most < 0 and not request.echo:"),
    ),
    *of("gateway", "services/gateway/api/translation.py", ("(least or 0) > most:", "(least or 0) > most + 1:")),
    *of(
        "gateway",
        "services/gateway/api/sglang/types.py",
        ('sampling_seed: int | None = parameter("sampling_seed", Api.GENERATE)', "sampling_seed: int | None = None"),
    ),
)

"""Small faults, and for each area the test files that must notice them."""

from __future__ import annotations

from dataclasses import dataclass

KERNELS_TOO = ("top_n_sigma", "triton_select_tokens", "triton_attention", "triton_measure_logprobs")
AREAS: dict[str, tuple[str, ...]] = {
    "chart": (
        *(
            f"tests/chart/test_{name}.py"
            for name in (
                "objects",
                "templates",
                "values",
                "pod_security",
                "network_policies",
                "settings",
                "upgrade",
                "images_rules",
            )
        ),
        "tests/contracts/test_chart_schema.py",
    ),
    "kernels": tuple(f"tests/kernels/test_{name}.py" for name in ("cpu_kernels", "triton_step", "triton_layers", *KERNELS_TOO)),
    "core": (
        *(f"tests/core/test_rules_{name}.py" for name in ("grammar", "logprobs", "finish", "priorities", "policies", "queue")),
        *(f"tests/core/test_rules_{name}.py" for name in ("budgets", "cache", "control", "sessions", "shares")),
    ),
    "grammar": ("tests/grammar/test_schema_keywords.py", "tests/grammar/test_text_grammars.py"),
    "gateway": (
        *(f"tests/services/gateway/api/test_{name}.py" for name in ("bad_input", "sglang_bad_input", "constraints")),
        *(f"tests/services/gateway/api/test_{name}.py" for name in ("limits_walked", "known_fields", "sglang_clients")),
        "tests/contracts/test_sampling_parameters.py",
        "tests/services/gateway/test_sampling_parameters.py",
        "tests/services/gateway/routing/test_routing_policies.py",
        "tests/services/gateway/discovery/test_discovery.py",
        "tests/services/gateway/admin/test_admin.py",
        "tests/services/worker/front/test_wire_submit.py",
        "tests/services/worker/front/test_limits_walked.py",
    ),
    "worker": (
        "tests/contracts/test_worker_defaults.py",
        "tests/services/worker/test_engine_config.py",
        "tests/exec/test_weight_stream.py",
        "tests/services/tokenizer/test_chat_template.py",
        "tests/services/tokenizer/pieces/test_piece_encoder.py",
        "tests/services/detokenizer/test_token_texts.py",
        "tests/services/shared/test_probe.py",
    ),
    "exec": (
        *(f"tests/exec/test_{name}.py" for name in ("sampler", "penalties", "token_sets", "logprobs", "embedding_pool")),
        "tests/exec/test_flashinfer_backend.py",
        "tests/kernels/test_sampling_twin.py",
        "tests/kernels/test_cpu_kernels.py",
    ),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """right: text that is in the file once; wrong: what takes its place. only: the one of its area's files that is about it."""

    area: str
    path: str
    right: str
    wrong: str
    only: str = ""

    @property
    def name(self) -> str:
        return f"{self.path}: {' '.join(self.right.split())[:48]} → {' '.join(self.wrong.split())[:48]}"


def of(area: str, path: str, *changes: tuple[str, str], only: str = "") -> tuple[Fault, ...]:
    return tuple(Fault(area, path, right, wrong, only) for right, wrong in changes)


TEMPLATES = "charts/rootstock/templates"
CHART = (
    *of(
        "chart",
        f"{TEMPLATES}/_pod.tpl",
        ("enableServiceLinks: false", "enableServiceLinks: true"),
        ("readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false"),
        only="test_pod_security",
    ),
    *of(
        "chart",
        f"{TEMPLATES}/_pod.tpl",
        ("add .root.Values.drainSeconds 15", "add .root.Values.drainSeconds 10"),
        ("{{- with .values.nodeSelector }}", "{{- with .root.Values.gateway.nodeSelector }}"),
        ("{{- if or .values.tolerations $gpu }}", "{{- if $gpu }}"),
        only="test_templates",
    ),
    *of(
        "chart",
        f"{TEMPLATES}/_pod.tpl",
        ("whenUnsatisfiable: ScheduleAnyway", "whenUnsatisfiable: DoNotSchedule"),
        only="test_objects",
    ),
    *of(
        "chart",
        f"{TEMPLATES}/_scaling.tpl",
        (
            "type: Percent, value: 100, periodSeconds: {{ $coldStart }}",
            "type: Percent, value: 100, periodSeconds: 60",
        ),
        only="test_templates",
    ),
    *of("chart", f"{TEMPLATES}/_service.tpl", ("targetPort: metrics", "targetPort: metric"), only="test_objects"),
    *of(
        "chart",
        f"{TEMPLATES}/_helpers.tpl",
        ("{{- with default .component .role }}", "{{- with .component }}"),
        ('{{- if eq .values.discovery "k8s" }}true{{ end -}}', "true"),
        only="test_templates",
    ),
    *of(
        "chart",
        f"{TEMPLATES}/_helpers.tpl",
        (
            "app.kubernetes.io/instance: {{ .root.Release.Name }}",
            "app.kubernetes.io/instance: {{ .root.Release.Name }}-{{ .root.Chart.Version }}",
        ),
        only="test_upgrade",
    ),
    *of("chart", f"{TEMPLATES}/_config.tpl", ("ROOTSTOCK_GRACE_S:", "ROOTSTOCK_GRACE_SECONDS:"), only="test_settings"),
    *of(
        "chart",
        f"{TEMPLATES}/_models.tpl",
        ('{{- if eq .type "pvc" }}', '{{- if and (eq .type "pvc") (ne $.component "detokenizer") }}'),
        only="test_templates",
    ),
    *of(
        "chart",
        f"{TEMPLATES}/network/gateway.yaml",
        ('"component" "detokenizer" "ports" (list 7002)', '"component" "detokenizer" "ports" (list 7001)'),
        only="test_network_policies",
    ),
    *of(
        "chart",
        f"{TEMPLATES}/worker/hpa.yaml",
        ('{{- if eq .Values.autoscaling.engine "hpa" }}', "{{- if true }}"),
        ("{{- if .worker.autoscaling.enabled }}", "{{- if true }}"),
        only="test_upgrade",
    ),
    *of(
        "chart",
        "charts/rootstock/values_schema.py",
        ('"discovery": choice("dns", "k8s")', '"discovery": string()'),
        ('"hosts": integer(1),', '"hosts": integer(0),'),
        ('"additionalProperties": False,\n        "properties": properties,', '"properties": properties,'),
        ('"peer_host", "peer_port", "peers"', '"peer_host", "peers"'),
        only="test_chart_schema",
    ),
    *of(
        "chart",
        "tests/chart/dockerfile_rules.py",
        (r're.match(r"\d+\.\d+\.\d+", tag)', r're.match(r"\d+", tag)'),
        only="test_images_rules",
    ),
    *of(
        "chart",
        f"{TEMPLATES}/tokenizer/deployment.yaml",
        ("{{- if not .tokenizer.autoscaling.enabled }}", "{{- if true }}"),
        only="test_objects",
    ),
)

CPU = "kernels/cpu/src"
KERNELS = (
    *of(
        "kernels",
        f"{CPU}/elementwise.cpp",
        ("sum / static_cast<float>(size) + eps", "sum / static_cast<float>(size + 1) + eps"),
        ("widen(sum[i]) + widen(source[i])", "widen(sum[i]) - widen(source[i])"),
        ("high * cos_sin[i] + low * cos_sin[half + i]", "high * cos_sin[i] - low * cos_sin[half + i]"),
        ("offset = location % shape.page_size;", "offset = (location + shape.page_size / 8) % shape.page_size;"),
        only="test_cpu_kernels",
    ),
    *of(
        "kernels",
        f"{CPU}/draw.cpp",
        ("place = begin + (std::find(", "place = (std::find("),
        ("std::min<size_t>(ids.size(), rule.top_k)", "std::min<size_t>(ids.size(), rule.top_k + 1)"),
        ("mass += row.mass[id] >= rule.min_p", "mass += row.mass[id] >= 2 * rule.min_p"),
        only="test_cpu_kernels",
    ),
    *of(
        "kernels",
        f"{CPU}/draw.cpp",
        ("number += x[i] > kNone;", "number += 1;"),
        ("squares / static_cast<double>(number)", "squares / static_cast<double>(number - 1)"),
        ("/ rule.temperature < least) row", "/ rule.temperature <= least) row"),
        ("row.size) / rule.temperature);", "row.size));"),
        only="test_top_n_sigma",
    ),
    *of(
        "kernels",
        f"{CPU}/logprobs.cpp",
        ("largest_of(x + first, end - first) >", "largest_of(x + first, end - first - 1) >"),
        ("std::fill(ids + held, ids + num, -1);", ""),
        only="test_cpu_kernels",
    ),
    *of(
        "kernels",
        f"{CPU}/select.cpp",
        ("std::isfinite(logits[best])", "!std::isnan(logits[best])"),
        only="test_cpu_kernels",
    ),
    *of(
        "kernels",
        "kernels/reference/draws.py",
        ("scaled < -(sigma", "scaled <= -(sigma"),
        ("std(correction=0)", "std()"),
        only="test_top_n_sigma",
    ),
    *of(
        "kernels",
        "kernels/triton/sampling/select_rounds.py",
        ("(within + tl.sum(numbers * away * away)) / number", "tl.sum(numbers * away * away) / number"),
        ("tl.sum(tl.where(keys <= limit, mass_of(keys), 0))", "tl.sum(tl.where(keys <= KEY_END, mass_of(keys), 0))"),
        only="test_top_n_sigma",
    ),
    *of(
        "kernels",
        "kernels/triton/sampling/measure_logprobs.py",
        ("tl.minimum(first + TILES, tl.cdiv(vocab_size, TILE))", "tl.minimum(first + TILES, vocab_size // TILE)"),
        ("best == worst, next_best, best)", "best == worst, next_best + 1, best)"),
        only="test_triton_measure_logprobs",
    ),
    *of(
        "kernels",
        "kernels/triton/attention/attention_tiles.py",
        ("tl.maximum(start + first + 1 - window, 0)", "tl.maximum(start + first - window, 0) // 16 * 16 + 16"),
        only="test_triton_attention",
    ),
    *of(
        "kernels",
        "kernels/triton/layers/step.py",
        ("tl.store(out + begin + entries, tl.maximum(page, 0)", "tl.store(out + begin + entries, page"),
        only="test_triton_step",
    ),
    *of("kernels", f"{CPU}/attention.h", ("position - window + 1)", "position - window)"), only="test_cpu_kernels"),
    *of(
        "kernels",
        f"{CPU}/attention.cpp",
        ("const int64_t kv_head = head / job.group();", "const int64_t kv_head = head % job.kv_heads;"),
        (
            "position = job.starts[row] + token - job.offsets[row];",
            "position = job.starts[row] + (row > 2 ? 0 : token - job.offsets[row]);",
        ),
        ("narrow<T>(sums[d] * inverse)", "narrow<T>(sums[d] * (dim == 96 && job.page_size == 4 ? 0.9f : 1.0f) * inverse)"),
        (
            "for (int64_t d = 0; d < dim; ++d) sums[d] += weight",
            "for (int64_t d = 0; d < (sizeof(T) == 4 && job.window == 70 ? dim - 1 : dim); ++d) sums[d] += weight",
        ),
        only="test_cpu_kernels",
    ),
    *of(
        "kernels",
        f"{CPU}/linear_bf16.cpp",
        ("static_cast<__mmask16>((1u << left) - 1)", "static_cast<__mmask16>((1u << (left - 1)) - 1)"),
        ("widen16(job.bias + block * kTileCols + v * 16)", "widen16(job.bias + v * 16)"),
        ("for (int r = 0; r < ROWS; ++r) sums[r][v] =", "for (int r = 0; r < ROWS - (ROWS > 4); ++r) sums[r][v] ="),
        ("place : half + place;", "place : half + std::min(place, half - 2);"),
        ("begin = piece / blocks * rows_per_part;", "begin = piece / blocks * (rows_per_part + (parts > 5));"),
        only="test_cpu_kernels",
    ),
    *of(
        "kernels",
        f"{CPU}/tile_bf16.h",
        ("case 3: work.template operator()<3>()", "case 3: work.template operator()<2>()"),
        ("case 5: work.template operator()<5>()", "case 5: work.template operator()<4>()"),
        only="test_cpu_kernels",
    ),
    *of(
        "kernels",
        f"{CPU}/vector16.h",
        ("_mm512_set1_ps(-87.0f), _CMP_LT_OQ", "_mm512_set1_ps(-1.0f), _CMP_LT_OQ"),
        ("t[12 + i] = odd_lanes(b, d);", "t[12 + i] = odd_lanes(b, c);"),
        only="test_cpu_kernels",
    ),
    *of(
        "kernels",
        f"{CPU}/attention_direct.cpp",
        ("job.page_size - (first + i) % job.page_size", "job.page_size - i % job.page_size"),
        ("for (int64_t i = count; i < padded; ++i)", "for (int64_t i = count + 1; i < padded; ++i)"),
        ("_mm512_set1_ps(inverse[h])", "_mm512_set1_ps(inverse[0])"),
        ("mix<VECTORS, 1>(job, places.data(), count, weights, padded, inverse + h, out)", "out[0] = bf16{0}"),
        ("case 96: attend_token<3>", "case 96: attend_token<2>"),
        ("case 128: attend_token<4>", "case 128: attend_token<3>"),
        ("default: attend_token<8>", "default: attend_token<4>"),
        only="test_cpu_kernels",
    ),
    *of(
        "kernels",
        f"{CPU}/attention_tile.cpp",
        ("std::clamp<int64_t>(position + 1 - begin,", "std::clamp<int64_t>(position - begin,"),
        ("std::clamp<int64_t>(seen - begin,", "std::clamp<int64_t>(seen + 1 - begin,"),
        ("tile.total[query] * fade", "tile.total[query]"),
        ("block < tile.wide / 64", "block < tile.job.head_dim / 64"),
        ("job.first_seen(tile.start) / kKeys * kKeys", "(job.first_seen(tile.start) + kKeys - 1) / kKeys * kKeys"),
        ("tile.kv_head * group + query % group)", "tile.kv_head * group + query % std::min<int64_t>(group, 8))"),
        only="test_cpu_kernels",
    ),
    *of(
        "kernels",
        f"{CPU}/draw.cpp",
        ("if (row.highest[block] < bound) continue;", "if (row.highest[block] <= bound) continue;"),
        ("return highest[k - 1];", "return highest[k / 2];"),
        ("const double least = ranked ? 0.0 :", "const double least = ranked ? rule.min_p * 40 :"),
        only="test_cpu_kernels",
    ),
    *of(
        "kernels",
        f"{CPU}/elementwise.cpp",
        ("rotate(keys + place, k + head * dim, k_norm,", "rotate(keys + place, k + head * dim, q_norm,"),
        ("if (location < 0) return;", "if (location < -1) return;"),
        only="test_cpu_kernels",
    ),
    *of(
        "kernels",
        f"{CPU}/logprobs.cpp",
        ("if (held == num && !(x[i] > values[num - 1])) continue;", "if (held == num && !(x[i] >= values[num - 1])) continue;"),
        ("tokens[i] < size ? x[tokens[i]]", "tokens[i] < size - 1 ? x[tokens[i]]"),
        only="test_cpu_kernels",
    ),
    *of(
        "kernels",
        "kernels/triton/layers/step.py",
        ("& (position >= 0) & (logical <", "& (position >= 0) & (logical <="),
        ("tl.atomic_add(unwritten, missing, mask=missing > 0)", "tl.atomic_add(unwritten, missing, mask=missing > 1)"),
        only="test_triton_step",
    ),
    *of(
        "kernels",
        "kernels/triton/layers/layers.py",
        ("if weight.bias is not None:\n            out.add_(weight.bias)", "if weight.bias is None:\n            out.add_(0.0)"),
        only="test_triton_layers",
    ),
)

CORE = (
    *of(
        "core",
        "services/worker/core/intake.py",
        ("place == len(forced) and matcher.terminated", "matcher.terminated"),
        ("            if ending is not None:\n                return ending\n        if forced:", "        if forced:"),
        ("if ending is None and request.jump:", "if ending is None:"),
    ),
    *of(
        "core",
        "services/worker/core/queue/finish.py",
        ("if count >= params.max_new_tokens:", "if count > params.max_new_tokens:"),
    ),
    *of(
        "core",
        "services/worker/core/committer.py",
        ("count = columns.num_out[slots] + 1", "count = columns.num_out[slots] + 2"),
        ("request.logprob_done += len(values.values)", "request.logprob_done = len(values.values)"),
        ("if (sound[row] or counts) and row in", "if sound[row] and row in"),
    ),
    *of(
        "core",
        "services/worker/core/queue/admission.py",
        ("max(params.prompt_logprobs_from, 1)", "max(params.prompt_logprobs_from, 0)"),
    ),
    *of(
        "core",
        "services/worker/core/retraction.py",
        ("request.rank > config.priority_preemption_threshold]", "request.rank >= config.priority_preemption_threshold]"),
        only="test_rules_priorities",
    ),
    *of(
        "core",
        "services/worker/core/queue/finish.py",
        ("if fault is RowFault.NO_TOKEN_ALLOWED:", "if fault is RowFault.OUT_OF_VOCAB:"),
        only="test_rules_finish",
    ),
    *of("core", "services/worker/core/queue/request.py", ("self.logprob_done - 1)", "self.logprob_done)")),
    *of(
        "core",
        "services/worker/core/new_token_ratio.py",
        ("min(INIT_RATIO * conservativeness, 1.0)", "min(INIT_RATIO * conservativeness, 1.02)"),
        ("(self._init - self._floor) / DECAY_STEPS", "(self._init - self._floor) / (DECAY_STEPS - 1)"),
        ("/ (sum_max_new + 1))", "/ sum_max_new)"),
        only="test_rules_budgets",
    ),
    *of(
        "core",
        "services/worker/core/prefill_adder.py",
        ("CLIP_MAX_NEW_TOKENS = 4096", "CLIP_MAX_NEW_TOKENS = 4097"),
        ("np.minimum(rows.remaining, CLIP_MAX_NEW_TOKENS).sum()", "rows.remaining.sum()"),
        (
            "self._chunk = max(chunked_prefill_size - num_decode_rows, page_size)",
            "self._chunk = max(chunked_prefill_size - num_decode_rows, 1)",
        ),
        ("need >= available - self._reserved", "need > available - self._reserved"),
        ("(start + room) // self._page_size * self._page_size", "start + room // self._page_size * self._page_size"),
        only="test_rules_budgets",
    ),
    *of(
        "core",
        "services/worker/core/queue/sessions.py",
        ("else context[: turn.offset]", "else context[: turn.offset + 1]"),
        only="test_rules_sessions",
    ),
    *of(
        "core",
        "services/worker/core/queue/policy.py",
        ("count <= IN_BATCH_CHECK_THRESHOLD", "count < IN_BATCH_CHECK_THRESHOLD"),
        ("config.schedule_policy is SchedulePolicy.LPM and num_waiting >", "num_waiting >"),
        only="test_rules_policies",
    ),
    *of(
        "core",
        "services/worker/core/kv/cache_events.py",
        ("if name in self._stored:\n                del self._stored[name]\n            else:", "if name not in self._held:"),
        ("self._cleared = True\n        self._held.clear()", "self._held.clear()"),
        only="test_rules_cache",
    ),
    *of(
        "core",
        "services/worker/core/queue/finish.py",
        ("count >= params.min_new_tokens and is_stop", "count > params.min_new_tokens and is_stop"),
        only="test_rules_finish",
    ),
    *of(
        "core",
        "services/worker/core/tunables.py",
        ("(number != value or number < 0)", "number != value"),
        ("old = getattr(config, name)\n    if isinstance(old, enum.Enum):", "old = getattr(config, name)\n    if False:"),
        only="test_rules_control",
    ),
    *of(
        "core",
        "services/worker/core/step_rows.py",
        ("if request.params.prompt_logprobs_from >= 0:", "if request.params.prompt_logprobs_from > 0:"),
    ),
)

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

GRAMMAR = (
    *of(
        "grammar",
        "services/worker/grammar/schema/schema_support.py",
        ('if key not in _KNOWN and not key.startswith("x-"):', 'if key not in _KNOWN and "$" in key:'),
        only="test_schema_keywords",
    ),
    *of(
        "grammar",
        "services/worker/grammar/schema/regex_syntax.py",
        ("        if char.isalnum():\n            raise", "        if char.isupper():\n            raise"),
        ('raise self._refuse("octal escapes are not supported")', "return 0"),
    ),
)

SAMPLING = "services/worker/exec/sampling"
EXEC = (
    *of(
        "exec",
        "kernels/reference/sampling.py",
        ("lost = outputs * params.real(", "lost = (outputs > 0) * params.real("),
        ("torch.where(x > 0, wide / repetition", "torch.where(x < 0, wide / repetition"),
        (
            "scaled = torch.where(x > 0, wide / repetition, wide * repetition).clamp(FINITE.min, FINITE.max)",
            "scaled = torch.where(x > 0, wide / repetition, wide * repetition)",
        ),
        ("x[token] += bias", "x[token] = bias"),
        ("if not _is_finite(logits[row]):", "if bool(logits[row].isnan().any()):"),
        ("out.mass[index] = mass", "out.mass[index] = x[x.isfinite()].logsumexp(0)"),
        ("relay[slot] = token", "relay[row] = token"),
    ),
    *of(
        "exec", "kernels/reference/draws.py", ("scaled = (logits - logits.max()) / temperature", "scaled = logits / temperature")
    ),
    *of(
        "exec",
        "kernels/reference/draws.py",
        ("before = chances.cumsum(0) - chances", "before = chances.cumsum(0)"),
        ("logits.max() + math.log(min_p)", "logits.max() + math.log(min_p) / 2"),
        ("[: count - len(above)]", "[-(count - len(above)) :]"),
    ),
    *of(
        "exec",
        f"{SAMPLING}/admission.py",
        (
            "history[: slot.num_prompt_tokens], history[slot.num_prompt_tokens :]",
            "history[: slot.num_prompt_tokens], history[slot.num_prompt_tokens + 1 :]",
        ),
        (
            "row[SlotColumn.STOPPED_UNTIL] = slot.num_prompt_tokens + params.min_new_tokens",
            "row[SlotColumn.STOPPED_UNTIL] = params.min_new_tokens",
        ),
        ("params.seed >> 32 & MASK32", "params.seed & MASK32"),
        ("return bool(params.frequency_penalty or params.presence_penalty or", "return bool(params.frequency_penalty or"),
    ),
    *of(
        "exec", f"{SAMPLING}/token_sets.py", ("bits[inside(banned, vocab_size)] = 0", "bits[inside(banned[1:], vocab_size)] = 0")
    ),
    *of(
        "exec",
        f"{SAMPLING}/logprob_requests.py",
        ("self._num_top[index] = params.top_logprobs", "self._num_top[index] = max(self._num_top[index], params.top_logprobs)"),
        ("self._measure_piece(piece, first + begin, targets", "self._measure_piece(piece, first, targets"),
        ("if not np.isfinite(mass).all():", "if np.isnan(mass).all():"),
    ),
    *of(
        "exec",
        f"{SAMPLING}/dry.py",
        ("longest = next((i for i, token in enumerate(back) if token in breakers), size)", "longest = size"),
        ("np.minimum(self._lengths[first : self._size], np.arange(self._size - first))", "self._lengths[first : self._size]"),
    ),
    *of(
        "exec",
        f"{SAMPLING}/logprob_requests.py",
        ("PIECE_BYTES // (4 * vocab_size))", "PIECE_BYTES // (4 * vocab_size) + 1)"),
        only="test_logprobs",
    ),
    *of(
        "exec",
        "services/worker/exec/attention/flashinfer_backend.py",
        ("pages.tail(extend), slot, len(self._shape.windows))", "pages.tail(extend), slot, 0)"),
        ("head, tail = columns.head(extend),", "head, tail = columns.head(rows),"),
        only="test_flashinfer_backend",
    ),
    *of(
        "exec",
        "services/worker/exec/pools/embedding_pool.py",
        (
            "wanted = normalize if self.params.normalize is None else self.params.normalize",
            "wanted = normalize or bool(self.params.normalize)",
        ),
        ("return 0, int(plan.starts[row] == 0)", "return 0, 1"),
        ("states.sum(0, dtype=torch.float32)", "states.sum(0)"),
        ("if self.params.dimensions else mean", "if self.params.dimensions > 1 else mean"),
    ),
)
WORKER = (
    *of(
        "worker",
        "services/worker/scheduler_config.py",
        ("max_sessions=settings.max_sessions", "max_sessions=settings.max_sessions + 1"),
        ("settings.enable_mixed_chunk and not whole", "not whole and bool(settings.enable_mixed_chunk or True)"),
        ("page_size=info.page_size", "page_size=max(info.page_size, 32)"),
        ("random_seed=RANDOM_SEED", "random_seed=hash(info)"),
        ("graph_rereads=info.graph_rereads", "graph_rereads=0"),
    ),
    *of(
        "worker",
        "services/worker/exec/weights/staging.py",
        (
            "elements = staged.view(dtype)",
            "elements = staged.view(into.dtype if into.dtype.itemsize == dtype.itemsize else dtype)",
        ),
        only="test_weight_stream",
    ),
    *of(
        "worker",
        "services/tokenizer/pieces/piece_encoder.py",
        ("if at and self._boundaries.drops_blank else text[at:end]", "if self._boundaries.drops_blank else text[at:end]"),
        only="test_piece_encoder",
    ),
)
FAULTS = (*CHART, *KERNELS, *CORE, *GATEWAY, *GRAMMAR, *EXEC, *WORKER)

"""Of the scheduler."""

from __future__ import annotations

from tests.mutants.fault import of

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
        ("if self._changed.pop(name) is not tier:", "if self._changed.pop(name) is not tier or tier is None:"),
        ("self._cleared = True\n        self._changed", "self._changed"),
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
    *of(
        "core",
        "services/worker/core/queue/admission.py",
        ("if given and params.prompt_logprobs_from >= 0:", "if False:"),
        ("num_sent=given", "num_sent=0"),
        only="test_rules_resume",
    ),
    *of(
        "core",
        "services/worker/core/scheduler.py",
        ("if request.num_given and request.phase is Phase.WAITING:", "if False:"),
        only="test_rules_resume",
    ),
)

"""Seeded faults in the executor. The tests of a fault's area (areas.py) must detect the fault."""

from __future__ import annotations

from tests.mutants.fault import of

SAMPLING = "services/worker/exec/sampling"
WEIGHTS = "services/worker/exec/weights"
EXEC = (
    *of(
        "exec",
        f"{WEIGHTS}/quantization.py",
        (".add_(scheme.zero)", ".add_(scheme.zero - 1)"),
        ("head = INT8 if self.options.head else AUTO", "head = self.options.weights"),
        only="test_quantized",
    ),
    *of(
        "exec",
        f"{WEIGHTS}/layouts/gptq.py",
        (
            'quantization.get("checkpoint_format") == "gptq_v2" else 1',
            'quantization.get("checkpoint_format") == "gptq_v2" else 0',
        ),
        ("codes = codes[:, order]", "pass"),
        ("if self._symmetric and bool(", "if bool("),
        only="test_quantized",
    ),
    *of("exec", f"{WEIGHTS}/layouts/awq.py", ("(0, 4, 1, 5, 2, 6, 3, 7)", "(0, 2, 4, 6, 1, 3, 5, 7)"), only="test_quantized"),
    *of(
        "exec",
        f"{WEIGHTS}/layouts/mxfp4.py",
        ("exponents.float() - OFFSET - 1", "exponents.float() - OFFSET"),
        only="test_quantized",
    ),
    *of(
        "exec",
        f"{WEIGHTS}/layouts/compressed_tensors.py",
        ("codes.view(torch.uint8) ^ 128", "codes.view(torch.uint8)"),
        (", blocks=False)", ")"),
        only="test_quantized",
    ),
    *of(
        "exec",
        "services/worker/exec/step/step_experts.py",
        ("ids[:, : int(plan.num_tokens.sum())]", "ids"),
        ("tokens if columns.order is None else np.argsort(columns.order)[tokens]", "tokens"),
        ("(ends - plan.num_tokens)[plan.routed_rows] + plan.routed_offsets", "(ends - plan.num_tokens)[plan.routed_rows]"),
        only="test_expert_record",
    ),
    *of(
        "exec",
        "services/worker/exec/step/passes.py",
        ("routed_offsets = np.maximum(plan.routed_offsets - first, 0)", "routed_offsets = plan.routed_offsets"),
        ("np.searchsorted(rows, plan.routed_rows[routed])", "plan.routed_rows[routed]"),
        only="test_expert_record",
    ),
    *of(
        "exec",
        "services/worker/exec/step/drafted_steps.py",
        ("wanted[list(draft_tokens)] |= plan.counts_experts", "pass"),
        ("for at in range(first + int(counts[row]), first + 1 + proposed):", "for at in range(0):"),
        only="test_expert_record",
    ),
    *of(
        "exec",
        "services/worker/exec/models/experts.py",
        ("self.routing.top_k, torch.int32)[self.index]", "self.routing.top_k, torch.int32)[0]"),
        only="test_expert_record",
    ),
    *of(
        "exec",
        f"{SAMPLING}/logprob_requests.py",
        ("np.cumsum(plan.num_tokens, dtype=np.int64)[rows] - 1", "np.cumsum(plan.num_tokens, dtype=np.int64)[rows] - 2"),
        ('label_rows = views["score_rows"][labels].long() - begin', 'label_rows = views["score_rows"][labels].long()'),
        ("self._labels.pop(index, None)\n", "\n"),
        only="test_scores",
    ),
    *of(
        "exec",
        "services/worker/exec/step/model_runner.py",
        ("plan.sample & ~self._prompt_only[plan.slots] if plan.num_extend else plan.sample", "plan.sample"),
        only="test_scores",
    ),
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
        "exec",
        "kernels/reference/sampling.py",
        ("scaled = (logits - logits.max()) / temperature", "scaled = logits / temperature"),
    ),
    *of(
        "exec",
        "kernels/reference/sampling.py",
        ("before = chances.cumsum(0) - chances", "before = chances.cumsum(0)"),
        ("logits.max() + math.log(min_p)", "logits.max() + math.log(min_p) / 2"),
        ("[: count - len(above)]", "[-(count - len(above)) :]"),
    ),
    *of(
        "exec",
        f"{SAMPLING}/slots.py",
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
    *of("exec", f"{SAMPLING}/slots.py", ("bits[inside(banned, vocab_size)] = 0", "bits[inside(banned[1:], vocab_size)] = 0")),
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
        ("tails, slot, len(self._shape.windows))", "tails, slot, 0)"),
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
    *of(
        "groups",
        "services/worker/exec/step/passes.py",
        ("state_before=plan.state_before if first == 0 else scratch", "state_before=plan.state_before"),
        ("has_cut = first < cut <= end", "has_cut = first < cut < end"),
        ("state_after=plan.state_after[rows]", "state_after=plan.state_after[: len(rows)]"),
        only="test_passes",
    ),
    *of(
        "groups",
        "services/worker/exec/step/model_runner.py",
        ("left = 1 - run.scratch", "left = run.scratch"),
        ("        run.scratch = scratch\n", ""),
        only="test_device_memory",
    ),
    *of(
        "groups",
        "services/worker/exec/models/attention.py",
        ("torch.cat((order[:rotated], rest[: half - rotated]", "torch.cat((rest[: half - rotated], order[:rotated]"),
        ("return (heads + self.head_dim + torch.arange", "return (heads + torch.arange"),
        ("context.window_rows if self.rule.window else context.rows", "context.rows"),
        only="test_parity",
    ),
    *of(
        "groups",
        "services/worker/exec/models/rope.py",
        ("torch.cat((cos, rest + 1.0, sin, rest), dim=-1)", "torch.cat((cos, rest, sin, rest + 1.0), dim=-1)"),
        only="test_parity",
    ),
    *of(
        "groups",
        "services/worker/exec/models/layers.py",
        ("            out.mul_(self.scale)\n", "            pass\n"),
        ("cls(weight + 1.0 if centered else weight, eps", "cls(weight, eps"),
        only="test_parity",
    ),
)

"""The executor for CPUs: one thread with a FIFO queue stands for the forward stream.

The thread alone touches tensors, pools and the relay. The loop's thread only queues work and waits; each Run carries its
own event, so a failure reaches the waiter of the step that failed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from kernels.cpu import load_kernels
from kernels.ops import RaggedRows
from services.worker.core.plan import BatchPlan, StepResult
from services.worker.exec.checkpoint import Checkpoint, eos_token_ids, read_config
from services.worker.exec.decoder import Decoder
from services.worker.exec.families import decoder_config
from services.worker.exec.future_map import FutureMap
from services.worker.exec.model_info import ModelInfo
from services.worker.exec.pools import KVPool, PageTable, PoolTooSmall, free_memory, kv_bytes_per_token, kv_pool_tokens
from services.worker.exec.protocol import ExecutorError, Run
from services.worker.exec.rope import rope_table
from services.worker.exec.sampler import Sampler
from services.worker.exec.weights import load_weights, resolve_dtype

CLOSE_TIMEOUT_S = 30.0


@dataclass(slots=True)
class CpuRun:
    """A launched step. Everything but plan and done belongs to the forward thread until done is set."""

    plan: BatchPlan
    done: threading.Event = field(default_factory=threading.Event)
    logits: torch.Tensor | None = None
    result: StepResult | None = None
    error: BaseException | None = None


class _Model:
    """What the forward thread runs: decoder, pools, relay and sampler."""

    def __init__(
        self, decoder: Decoder, pool: KVPool, table: PageTable, futures: FutureMap, sampler: Sampler, vocab_size: int
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._table = table
        self._futures = futures
        self._sampler = sampler
        self._vocab_size = vocab_size

    def forward(self, run: CpuRun) -> None:
        plan = run.plan
        self._table.update(plan)
        for slot in plan.admitted:
            self._sampler.admit(slot)
        if plan.admitted:
            self._futures.poison(torch.tensor([slot.slot for slot in plan.admitted]))
        if plan.num_rows == 0:
            return
        rows = self._rows(plan)
        ends = np.cumsum(plan.num_tokens)[plan.sample] - 1
        run.logits = self._decoder.forward(self._input_ids(plan), rows, self._pool, torch.from_numpy(ends))

    def _input_ids(self, plan: BatchPlan) -> torch.Tensor:
        """int64[T], kept inside the vocabulary: a row that is dropped later may bring anything."""
        given = torch.from_numpy(plan.input_ids.astype(np.int64))
        relayed = self._futures.gather(torch.from_numpy(plan.slots[plan.num_extend :].astype(np.int64)))
        return torch.cat((given, relayed)).clamp_(0, self._vocab_size - 1)

    def _rows(self, plan: BatchPlan) -> RaggedRows:
        counts = plan.num_tokens
        starts = np.minimum(plan.starts, self._table.capacity - counts)
        offsets = (np.cumsum(counts) - counts).astype(np.int32)
        positions = (np.repeat(starts - offsets, counts) + np.arange(int(counts.sum()))).astype(np.int32)
        locations = self._table.locations(np.repeat(plan.slots, counts), positions)
        return RaggedRows(
            page_table=self._table.tensor,
            slots=torch.from_numpy(plan.slots.copy()),  # torch wants writable arrays; plans may be frozen
            starts=torch.from_numpy(starts),
            num_tokens=torch.from_numpy(counts.copy()),
            offsets=torch.from_numpy(offsets),
            positions=torch.from_numpy(positions),
            locations=torch.from_numpy(locations),
            max_context=int((starts + counts).max()),
        )

    def sample(self, run: CpuRun) -> None:
        plan, tokens = run.plan, np.zeros(run.plan.num_rows, dtype=np.int32)
        rows = np.flatnonzero(plan.sample)
        if run.logits is None or not len(rows):
            run.result = StepResult(plan.step_id, tokens, {}, {})
            return
        sampled = self._sampler.sample(run.logits, plan.slots[rows], (plan.starts + plan.num_tokens)[rows])
        self._futures.write(torch.from_numpy(plan.slots[rows].astype(np.int64)), sampled.tokens)
        tokens[rows] = sampled.tokens.numpy()
        run.result = StepResult(
            step_id=plan.step_id,
            tokens=tokens,
            faults={int(rows[index]): fault for index, fault in sampled.faults.items()},
            logprobs={int(rows[index]): values for index, values in sampled.logprobs.items()},
        )
        run.logits = None


class CpuExecutor:
    """Implements exec.protocol.Executor. A failed step fails its own waiter; the thread goes on with the next one."""

    def __init__(self, model: _Model, num_threads: int) -> None:
        self._model = model
        self._queue: queue.SimpleQueue[tuple[Callable[[CpuRun], None], CpuRun, bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(num_threads,), name="cpu-forward", daemon=True)
        self._thread.start()

    def forward(self, plan: BatchPlan) -> CpuRun:
        run = CpuRun(plan)
        self._queue.put((self._model.forward, run, False))
        return run

    def sample(self, run: Run) -> None:
        self._queue.put((self._model.sample, _own(run), True))

    def wait(self, run: Run) -> StepResult:
        own = _own(run)
        own.done.wait()
        if own.error is not None or own.result is None:
            raise ExecutorError(f"step {own.plan.step_id} failed: {own.error!r}") from own.error
        return own.result

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _serve(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # per thread, hence here
        with torch.inference_mode():
            while (task := self._queue.get()) is not None:
                work, run, last = task
                try:
                    if run.error is None:
                        work(run)
                except Exception as error:  # of any kind: it belongs to the waiter of this step
                    run.error = error
                if last or run.error is not None:
                    run.done.set()


def _own(run: Run) -> CpuRun:
    if not isinstance(run, CpuRun):
        raise TypeError(f"not a run of this executor: {run!r}")
    return run


def build_cpu_executor(
    model_path: str,
    dtype: str,
    page_size: int,
    max_slots: int,
    num_pages: int | None,
    mem_fraction_static: float,
    context_len: int | None,
    num_threads: int,
    progress: Callable[[str], None],
    check_relay: bool = False,
) -> tuple[CpuExecutor, ModelInfo]:
    """Loads a Hugging Face folder and starts the forward thread.

    dtype: auto, bfloat16, float16 or float32. num_pages: None to fill mem_fraction_static of the memory left after the
    weights. context_len: tokens; None for the model's own. check_relay: raise on decoding a slot that nothing was sampled for.
    Raises CheckpointError, UnsupportedModel, PoolTooSmall.
    """
    torch.set_num_threads(num_threads)
    folder = Path(model_path)
    loaded = read_config(folder)
    config = decoder_config(loaded)
    checkpoint = Checkpoint(folder)
    resolved = resolve_dtype(dtype, loaded, checkpoint)
    kernels = load_kernels(num_threads, resolved)
    with torch.inference_mode():
        weights = load_weights(checkpoint, config, resolved, kernels, progress)
    checkpoint.close()
    context = min(context_len or config.max_position_embeddings, config.max_position_embeddings)
    per_token = kv_bytes_per_token(config, resolved)
    pages = num_pages or kv_pool_tokens(free_memory(), mem_fraction_static, per_token) // page_size
    if pages < 1:
        raise PoolTooSmall(f"no room for a page of {page_size} tokens ({page_size * per_token} bytes) beside the weights")
    progress(f"KV pool: {pages} pages of {page_size} tokens, {pages * page_size * per_token >> 20} MiB")
    table = PageTable(max_slots, -(-context // page_size) + 1, page_size)
    cos_sin = rope_table(config.rope, config.head_dim, table.capacity)
    decoder = Decoder(config, weights, cos_sin, kernels)
    pool = KVPool.allocate(config, pages, page_size, resolved, kernels)
    sampler = Sampler(max_slots, config.vocab_size, kernels)
    model = _Model(decoder, pool, table, FutureMap(max_slots, check_relay), sampler, config.vocab_size)
    info = ModelInfo(
        architecture=config.architecture,
        context_len=context,
        vocab_size=config.vocab_size,
        eos_token_ids=eos_token_ids(folder, loaded),
        num_pages=pages,
        page_size=page_size,
        dtype=str(resolved).removeprefix("torch."),
        weight_bytes=weights.num_bytes(),
        kv_bytes_per_token=per_token,
    )
    return CpuExecutor(model, num_threads), info

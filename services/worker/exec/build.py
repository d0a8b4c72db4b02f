"""Builds an executor for a GPU or a CPU from a Hugging Face folder, or from a model that is already loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import torch

from rootstock_llm.kernels.contracts.step_ops import BringPieces
from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.worker.core.contracts.plan import VERIFIED_TOKENS
from rootstock_llm.services.worker.core.contracts.pool_sizes import PoolSizes
from rootstock_llm.services.worker.exec.attention.backend import AttentionBackend, AttentionShape, KernelAttention
from rootstock_llm.services.worker.exec.attention.choose import choose_attention
from rootstock_llm.services.worker.exec.contracts.causal_model import CausalModel
from rootstock_llm.services.worker.exec.contracts.drafter import HiddenStates
from rootstock_llm.services.worker.exec.contracts.model_info import LoadedInfo
from rootstock_llm.services.worker.exec.contracts.options import DeviceOptions
from rootstock_llm.services.worker.exec.contracts.peer_pages import KvServer
from rootstock_llm.services.worker.exec.contracts.protocol import ExecutorStats
from rootstock_llm.services.worker.exec.device import device_of, load_target, streams_of
from rootstock_llm.services.worker.exec.eager_cost import graph_limits, measured_eager_cost
from rootstock_llm.services.worker.exec.executor import DeviceExecutor
from rootstock_llm.services.worker.exec.kernel_set import KernelSet, bring_pieces, copies, sample_kernels
from rootstock_llm.services.worker.exec.loading import load_again, load_model
from rootstock_llm.services.worker.exec.memory_parts import MemoryParts, NoModel
from rootstock_llm.services.worker.exec.model_pools import ModelPools, host_budget
from rootstock_llm.services.worker.exec.models.attention import Attention
from rootstock_llm.services.worker.exec.models.decoder import Decoder
from rootstock_llm.services.worker.exec.models.loaded_model import LoadedModel
from rootstock_llm.services.worker.exec.pools.embedding_pool import EmbeddingPool
from rootstock_llm.services.worker.exec.pools.kv_pool import NO_POOL, Arrivals, KVPool
from rootstock_llm.services.worker.exec.sampling.logprob_requests import PIECE_BYTES
from rootstock_llm.services.worker.exec.sampling.sampler import EDITED_ROWS, DeviceSampler
from rootstock_llm.services.worker.exec.sizing import (
    DeviceMemoryUse,
    describe,
    estimated_graph_bytes,
    fitting_sizes,
    measured_use,
    pool_bytes,
)
from rootstock_llm.services.worker.exec.speculation import NO_DRAFT, Drafting, load_draft
from rootstock_llm.services.worker.exec.step.cuda_graph_runner import CudaGraphMemory, CudaGraphRunner, GraphMemory, graph_sizes
from rootstock_llm.services.worker.exec.step.drafted_steps import DraftedSteps
from rootstock_llm.services.worker.exec.step.idle_steps import StepBounds, largest_step
from rootstock_llm.services.worker.exec.step.model_runner import DeviceRunner
from rootstock_llm.services.worker.exec.step.passes import POISON, ForwardPass
from rootstock_llm.services.worker.exec.streams.cuda_streams import Streams
from rootstock_llm.services.worker.exec.streams.returned_memory import return_cached, return_memory
from rootstock_llm.services.worker.exec.tiers.make_tiers import make_mover
from rootstock_llm.services.worker.exec.tiers.page_copier import PageCopier, PoolReader
from rootstock_llm.services.worker.exec.tiers.page_mover import PageMover
from rootstock_llm.services.worker.exec.tiers.unit_copier import PieceCopies
from rootstock_llm.services.worker.exec.warm_up import PROMPTS, warm_up
from rootstock_llm.services.worker.exec.weights.load_progress import LoadPhases
from rootstock_llm.services.worker.exec.weights.load_request import LoadRequest
from rootstock_llm.services.worker.exec.weights.quantization import QuantizationOptions

logger = logging.getLogger(__name__)

EXTRA_GRAPH_ROWS = 64  # largest number of rows of a graph beyond one per slot, for extend rows and draft tokens
HOST_PROMPTS = (1, 20)  # tokens of the prompts that warm up a CPU; few, because a CPU has no kernels to compile
T = TypeVar("T")

__all__ = ["DeviceOptions", "assemble_executor", "build_device_executor"]


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """Replacements for the parts that the executor's options choose. A field is None if the options choose its part."""

    streams: Streams | None = None
    kernels: KernelSet | None = None
    attention: Callable[[AttentionShape], AttentionBackend] | None = None  # makes the attention back end
    graph_memory: GraphMemory | None = None
    eager_cost: float | None = None  # see GraphLimits; None to measure it


def build_device_executor(
    model_path: str,
    dtype: str,
    page_size: int,
    max_slots: int,
    num_pages: int | None,
    mem_fraction_static: float,
    context_len: int | None,
    options: DeviceOptions,
    progress: Callable[[str], None],
    check_relay: bool = False,
    parts: DeviceParts | None = None,
) -> tuple[DeviceExecutor, LoadedInfo]:
    """Loads the model of a folder and makes its executor.

    Args:
        dtype: auto, bfloat16, float16 or float32.
        num_pages: pages of the KV pool. None for as many as fit. On a GPU, model and pool together get the share
            mem_fraction_static of the memory. On a CPU, the pool gets this share of the memory that is free after loading.
        context_len: tokens of prompt and output together; None for the model's context. If num_pages is also None and the pool
            holds fewer tokens, the size of the pool is the context.
        check_relay: whether a step must fail if it decodes a slot for which no token was sampled.
        parts: see DeviceParts.

    Returns:
        The executor and the description of the loaded model.

    Raises:
        NoDevice: the machine does not have the device.
        CheckpointError: the folder is broken or lacks files.
        UnsupportedModel: the model is not supported with these options.
        PoolTooSmall: the pool would hold no page. On a GPU without num_pages: it would hold fewer tokens than context_len.
        ValueError: an option has an invalid value or is not available.
    """
    device = device_of(options.device)
    phases = LoadPhases()
    threads = options.num_threads
    torch.set_num_threads(threads)
    target = load_target(device, options)
    quantization = QuantizationOptions(options.quantization, options.quantize_head)
    request = LoadRequest(Path(model_path), dtype, page_size, context_len, threads, progress, target, phases, quantization)
    loaded = load_model(request)
    drafting = Drafting(draft := load_draft(request, loaded, options, load_model), options.draft_corpus)
    if draft.model is not None and draft.model.max_context < loaded.context_len:
        progress(
            f"the draft model has a context of {draft.model.max_context} tokens; longer requests continue without draft tokens"
        )
    made = _Assembly(loaded, max_slots, page_size, options, progress, phases, check_relay, parts, drafting)
    sizes = made.finish(num_pages, mem_fraction_static, context_len)
    pages = sizes.pages
    fitting = loaded.context_len if context_len or num_pages else min(loaded.context_len, pages * page_size)
    if fitting < loaded.context_len:
        logger.warning(
            "the KV pool is smaller than the model's context, so the context is reduced to the size of the pool. Set context_len"
            " to accept this, or raise mem_fraction_static for a larger pool",
            extra=fields(context_len=fitting, model_context=loaded.context_len),
        )
    info = loaded.info(request, pages, made.graph_rows, made.runner.graph_limits, fitting)
    info = replace(
        info,
        max_drafts=options.max_drafts,
        drafts_by_model=draft.model is not None,
        weight_bytes=info.weight_bytes + draft.weight_bytes,
        kv_bytes_per_token=made.pools.token_bytes,
        pool_bytes=made.pools.caches.bytes_of(sizes),
        groups=sizes.groups(made.pools.window, made.pools.caches.window_bytes, made.pools.caches.state_bytes),
        window_bytes=made.pools.caches.window_bytes,
        state_bytes=made.pools.caches.state_bytes,
        max_running_requests=sizes.max_running_requests(max_slots, options.max_drafts),
    )
    layout = f"{made.pools.layout} {info.numerics}"
    mover, host_pages = made.tiers(info.pool_bytes, layout)
    server = made.kv_server(layout)
    memory = made.memory_parts(request, sizes)
    executor = DeviceExecutor(made.runner, memory, steps=made.steps, mover=mover, server=server)
    progress(f"loaded in: {phases.describe()}")
    has_storage = mover is not None and mover.store is not None
    info = replace(info, host_pages=host_pages, has_storage=has_storage, kv_layout=layout)
    reads = mover is not None and mover.peers is not None
    return executor, replace(info, reads_peers=reads, kv_port=0 if server is None else server.port)


def assemble_executor(
    loaded: LoadedModel,
    max_slots: int,
    page_size: int,
    num_pages: int | None,
    mem_fraction_static: float,
    options: DeviceOptions,
    progress: Callable[[str], None],
    check_relay: bool = False,
    parts: DeviceParts | None = None,
) -> tuple[DeviceExecutor, int]:
    """Makes an executor for a model that is already on the device.

    Raises the same errors as build_device_executor().

    Returns:
        The executor and the number of pages of its pool.
    """
    made = _Assembly(loaded, max_slots, page_size, options, progress, LoadPhases(), check_relay, parts)
    sizes = made.finish(num_pages, mem_fraction_static)
    return DeviceExecutor(made.runner, steps=made.steps), sizes.pages


def _step_tokens(options: DeviceOptions, loaded: LoadedModel) -> int:
    """Returns the largest number of tokens of one forward pass. A pass of an encoder must hold the longest prompt."""
    if not loaded.is_encoder:
        return options.max_tokens
    return max(options.max_whole_tokens or options.max_tokens, loaded.context_len)


def _read_states(drafting: Drafting, passes: ForwardPass, num_tokens: int) -> HiddenStates:
    """Calls Drafting.read() with the present model of `passes`. Resuming the weights replaces this model."""
    return drafting.read(passes.model, num_tokens)


def _sum_in_float32() -> None:
    """Makes cuBLAS accumulate sums in float32, as Kernels.linear requires. The setting applies to the whole process."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


class _Assembly:
    """Makes and connects the parts of an executor. All device work runs on the forward stream."""

    def __init__(
        self,
        loaded: LoadedModel,
        max_slots: int,
        page_size: int,
        options: DeviceOptions,
        progress: Callable[[str], None],
        phases: LoadPhases,
        check_relay: bool,
        parts: DeviceParts | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self._drafting = drafting or Drafting(NO_DRAFT)
        self._loaded, self._max_slots, self._page_size = loaded, max_slots, page_size
        self._options, self._progress, self._phases = options, progress, phases
        self._parts = parts or DeviceParts()
        self._device = device_of(options.device)
        _sum_in_float32()
        self._arrivals = Arrivals()
        self._streams = self._parts.streams or streams_of(self._device, options.num_threads)
        vocab_size = int(loaded.config.vocab_size)
        rows = min(max_slots, EDITED_ROWS)
        self._kernels = self._parts.kernels or self._kernels_for(rows, vocab_size)
        self.pools = ModelPools(
            layers=loaded.layers,
            draft_layers=self._drafting.layers,
            dtype=loaded.dtype,
            page_size=page_size,
            max_slots=max_slots,
            context_len=loaded.context_len,
            device=self._device,
            kernels=self._kernels.layers,
            options=options,
            arrivals=self._arrivals,
        )
        pages_per_slot = -(-loaded.context_len // page_size) + 1
        self._max_tokens = min(_step_tokens(options, loaded), max_slots * loaded.context_len)
        # Largest number of rows that sample in one step, and largest number of rows of one call of the model's logits().
        self._max_sampled = max_slots + VERIFIED_TOKENS if options.max_drafts else max_slots
        self._max_logits = max(self._max_sampled, PIECE_BYTES // (4 * vocab_size))
        self._bounds = StepBounds(self._max_tokens, max_slots, loaded.context_len, loaded.generates)
        largest_graph = min(max_slots + EXTRA_GRAPH_ROWS, options.max_graph_rows, self._max_tokens)
        self._largest_graph = largest_graph if options.cuda_graphs else 0  # rows
        self.runner = self._run(partial(self._make_runner, vocab_size, pages_per_slot, check_relay))
        self.graph_rows = self._graph_rows()
        self.steps = self._run(self._drafted_steps) if options.max_drafts else None

    def _kernels_for(self, rows: int, vocab_size: int) -> KernelSet:
        """Returns the model's layer kernels, which decided the layout of its weights, and sampling kernels.

        Args:
            rows: largest number of rows that one launch samples.
        """
        options = self._options
        sampling = sample_kernels(options.kernels, self._device, options.num_threads, rows, vocab_size)
        return KernelSet(self._loaded.kernels, sampling)

    def _run(self, work: Callable[[], T]) -> T:
        """Runs `work` on the forward stream and returns its result. If `work` raises, the streams and their thread are closed."""

        def on_forward() -> T:
            with self._streams.on_forward():
                return work()

        try:
            return self._streams.collect(on_forward)()
        except BaseException:
            self._streams.close()
            raise

    def _make_runner(self, vocab_size: int, pages_per_slot: int, check_relay: bool) -> DeviceRunner:
        max_slots, device = self._max_slots, self._device
        table = torch.full((max_slots, pages_per_slot), -1, dtype=torch.int32, device=device)
        relay = torch.full((max_slots,), POISON, dtype=torch.int64, device=device)
        unwritten = torch.zeros(1, dtype=torch.int32, device=device) if check_relay else None
        model, attention = self._model_and_attention()
        passes = ForwardPass(
            model,
            self.pools.allocate(self.pools.smallest),
            self._kernels.layers,
            table,
            relay,
            self._page_size,
            vocab_size,
            unwritten,
            torch.full_like(table, -1) if self.pools.window else None,
            self.pools.has_states,
        )
        return DeviceRunner(
            streams=self._streams,
            passes=passes,
            attention=attention,
            kernels=self._kernels.layers,
            sampler=DeviceSampler(max_slots, vocab_size, self._kernels.sampling, self._streams, relay, self._max_sampled),
            embeddings=EmbeddingPool(self._loaded.pooling, device, self._options.deterministic),
            relay=relay,
            unwritten=unwritten,
            reclaim=partial(return_cached, device),
            max_tokens=self._max_tokens,
            max_wanted=self._max_logits,
            arrivals=self._arrivals,
            cut_rows=not self._loaded.is_encoder,
        )

    def _model_and_attention(self) -> tuple[CausalModel, AttentionBackend]:
        """Returns the model, which calls the chosen attention back end, and the back end.

        The model is removed from self._loaded, because this reference would otherwise keep the weights alive after
        their release.
        """
        model, self._loaded = self._loaded.model, replace(self._loaded, model=NoModel())
        if not isinstance(model, Decoder):
            return model, KernelAttention(self._kernels.layers)
        attentions = [layer.mixer for layer in model.model.layers if isinstance(layer.mixer, Attention)]
        sizes, context = model.model.config.attention, self._loaded.context_len
        pages_per_slot = -(-context // self._page_size) + 1
        shape = AttentionShape(
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            value_dim=sizes.head_dim,
            page_size=self._page_size,
            windows=tuple(dict.fromkeys(attention.rule.window for attention in attentions)),
            max_rows=max(self._max_sampled, self._largest_graph),
            max_tokens=self._max_tokens,
            max_context=pages_per_slot * self._page_size,
            max_pages=max(self._max_sampled, self._largest_graph) * pages_per_slot,
            separate_windows=self.pools.window > 0,
            has_softcap=any(attention.rule.softcap for attention in attentions),
            has_sinks=any(attention.rule.sinks is not None for attention in attentions),
        )
        backend = self._attention(shape)
        attending = model.attending(backend.attend, self._drafting.aux_layers)
        attending.reserve(self._max_tokens, self._max_logits)
        return attending, backend

    def _attention(self, shape: AttentionShape) -> AttentionBackend:
        if self._parts.attention is not None:
            return self._parts.attention(shape)
        name, dtype = self._options.attention_backend, self._loaded.dtype
        fixed = self._options.deterministic
        return choose_attention(name, shape, self._device, dtype, self._kernels.layers, self._progress, fixed)

    def _graph_rows(self) -> tuple[int, ...]:
        if (
            not self._largest_graph
            or not self.runner.attention.captures
            or (self._device.type != "cuda" and self._parts.graph_memory is None)
        ):
            return ()
        return graph_sizes(self._largest_graph)

    def finish(self, num_pages: int | None, mem_fraction_static: float, context_len: int | None = None) -> PoolSizes:
        """Allocates the pool, warms up and captures graphs. Returns the sizes of the pool.

        Args:
            num_pages: pages of the pool, or None for as many as fit into the memory.
            mem_fraction_static: see build_device_executor().
            context_len: tokens that the pool of a GPU must hold if num_pages is None; None for the tokens of one page.
        """
        return self._run(partial(self._finished, num_pages, mem_fraction_static, context_len or self._page_size))

    def _finished(self, num_pages: int | None, mem_fraction_static: float, context_len: int) -> PoolSizes:
        self._drafting.allocate(partial(self.pools.allocate, self.pools.smallest))
        with self._phases.timed("profile"):
            if num_pages is not None:
                sizes = self._given_sizes(num_pages, mem_fraction_static)
            else:
                sizes = self._sizes(mem_fraction_static, context_len)
        with self._phases.timed("kv_pool"):
            self.runner.passes.pool = NO_POOL  # frees the smallest pool, whose saved inputs are as large as those of the new pool
            self.runner.passes.pool = self.pools.allocate(sizes)
            self._drafting.allocate(partial(self.pools.allocate, sizes))
        self.pools.report(sizes, self._progress)
        with self._phases.timed("warm_up"):
            on_gpu = self._device.type == "cuda"
            prompts = (*PROMPTS, self._max_tokens) if on_gpu else HOST_PROMPTS
            warm_up(self.runner, self._bounds, prompts, self._options.max_drafts, on_gpu and self._options.deterministic)
            for tokens in prompts:
                self._run_draft_pass(min(tokens, self._max_tokens))
            self.runner.stats = ExecutorStats()
        with self._phases.timed("graphs"):
            self.capture()
            self._limit_graphs()
        self._streams.synchronize()
        return sizes

    def capture(self) -> None:
        """Captures decode steps as graphs if the executor uses graphs. The new graphs replace earlier ones."""
        if not self.graph_rows:
            return
        runner = self.runner
        memory = self._parts.graph_memory or CudaGraphMemory(self._streams)
        graphs = runner.graphs = CudaGraphRunner(self.graph_rows, memory, runner.passes, runner.sampler, runner.attention)

        def report(number: int, total: int) -> None:
            if number == total or number % 8 == 0:
                self._progress(f"captured {number} of {total} decode graphs")

        with torch.inference_mode(), self._streams.on_forward():
            self._capture_or_disable(partial(graphs.capture, report))

    def _limit_graphs(self) -> None:
        """Sets the limits up to which a graph also computes extend rows. Above them, a step without a graph is faster."""
        if not self.graph_rows:
            return
        rows, given = self.graph_rows[-1], self._parts.eager_cost
        cost = measured_eager_cost(self.runner, rows) if given is None else given
        limits = graph_limits(rows, cost, self._loaded.step_bytes(rows), self._loaded.kv_bytes_per_token)
        if self.pools.has_states:  # a graph's rows cannot pass a state on, so a graph computes one token of each sequence
            limits = replace(limits, rereads=0)
            more = "A graph computes one token of each request, because the model has recurrent layers"
        else:
            again = f"reads at most {limits.rereads} tokens of KV again for them"
            more = f"A graph also computes prompt tokens if it has free rows and {again}"
        self.runner.graph_limits = limits
        self._progress(f"a step of {rows} rows takes {1 + cost:.2f} times as long without its graph. {more}")

    def _capture_or_disable(self, capture: Callable[[], None]) -> None:
        """Calls `capture`, and disables graphs if it raises a RuntimeError other than OutOfMemoryError.

        Without graphs, steps run more slowly, with the same results.

        Raises:
            torch.OutOfMemoryError: the graphs do not fit.
            RuntimeError: the device does not respond after the failed capture.
        """
        try:
            capture()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            logger.exception("could not capture decode steps as graphs")
            self._progress(f"no decode graphs: the capture failed, so steps are launched kernel by kernel ({error})")
            self._streams.synchronize()
            self.runner.attention.release_graphs()
            self.runner.graphs, self.graph_rows = None, ()

    def tiers(self, num_bytes: int, layout: str) -> tuple[PageMover | None, int]:
        """Makes the mover of pages and units between tiers and workers.

        Args:
            num_bytes: bytes of the pool's pages and units.
            layout: see LoadedInfo.kv_layout.

        Returns:
            The mover and the number of pages of the host tier. (None, 0) if the model has no KV, or if the worker has neither
            tiers nor remote workers.

        Raises:
            ValueError: a tier or the reader of remote workers cannot be opened.
        """
        options, peers = self._options.tiers, self._options.peers
        open_reader = None if peers is None else peers.open_reader
        if not self._has_kv or (options is None and open_reader is None):
            return None, 0
        reader = None if open_reader is None else open_reader(layout.encode(), self._copier().page_bytes)
        page_bytes = self._copier().page_bytes
        pages = -(-num_bytes // page_bytes)
        return make_mover(options, pages, self._copier, self._arrivals, layout, self._streams, self._progress, reader)

    def kv_server(self, layout: str) -> KvServer | None:
        """Returns the server of KV reservations, or None if remote workers do not read this worker's KV.

        Raises:
            ValueError: the server cannot be opened with the worker's settings.
        """
        peers = self._options.peers
        if peers is None or peers.open_server is None or not self._has_kv:
            return None
        read_pages = PoolReader(self._streams, self._copier, self._arrivals)
        copier = self._copier()
        return peers.open_server(layout.encode(), copier.page_bytes, read_pages, [units.num_parts for units in copier.units])

    @property
    def _has_kv(self) -> bool:
        return not self._loaded.is_encoder and bool(self.pools.token_bytes)

    def _copier(self) -> PageCopier:
        """Returns a copier of the present pools. A release of memory makes the copier invalid: resuming replaces the pools."""
        return PageCopier((self.runner.passes.pool, self._drafting.pool), self._copies, self._bring_pieces)

    @cached_property
    def _copies(self) -> PieceCopies | None:
        return copies(self._options.kernels, self._device)

    @cached_property
    def _bring_pieces(self) -> BringPieces | None:
        return bring_pieces(self._options.kernels, self._device)

    def _drafted_steps(self) -> DraftedSteps:
        passes, drafting = self.runner.passes, self._drafting
        vocab_size = int(self._loaded.config.vocab_size)
        drafter = drafting.drafter(passes.table, self._page_size, vocab_size, self._streams)
        read = partial(_read_states, drafting, passes)
        return DraftedSteps(self.runner, drafter, self._max_slots, self._max_tokens, self._options.max_drafts, read)

    def memory_parts(self, request: LoadRequest, sizes: PoolSizes) -> MemoryParts:
        shape = self._loaded.shape

        def load_model_again() -> CausalModel:
            loaded = load_again(request, shape)
            self._drafting.replace_model(load_draft(request, loaded, self._options, load_model))
            self._loaded = loaded
            model, self.runner.attention = self._model_and_attention()
            return model

        def allocate_pools() -> KVPool:
            self._drafting.allocate(partial(self.pools.allocate, sizes))
            return self.pools.allocate(sizes)

        return MemoryParts(self.runner, load_model_again, allocate_pools, self.capture, self._drafting.drop)

    def _sizes(self, mem_fraction_static: float, context_len: int) -> PoolSizes:
        """Returns the sizes of the largest pool that fits into the memory. Raises PoolTooSmall."""
        if self.pools.caches.page_cost == 0:
            return PoolSizes(self._max_slots * -(-self._loaded.context_len // self._page_size))
        if self._device.type != "cuda":
            return self.pools.host_sizes(mem_fraction_static)
        use = self._measured_use()
        sizes = fitting_sizes(use, mem_fraction_static, self.pools.caches, self._page_size, context_len)
        self._progress(f"memory: {describe(use, mem_fraction_static, pool_bytes(use, mem_fraction_static))}")
        return sizes

    def _given_sizes(self, num_pages: int, mem_fraction_static: float) -> PoolSizes:
        """Returns the numbers of pages and units of a pool whose number of pages is a setting."""
        if not self.pools.has_states:
            return self.pools.caches.with_units(num_pages)
        if self._device.type == "cuda":
            budget = pool_bytes(self._measured_use(), mem_fraction_static)
        else:
            budget = host_budget(mem_fraction_static)
        return self.pools.caches.for_pages(num_pages, budget)

    def _measured_use(self) -> DeviceMemoryUse:
        self._run_draft_pass(self._max_tokens)  # allocates the drafter's permanent buffers, which are part of the workspace
        weight_bytes = self._loaded.weight_bytes + self._drafting.weight_bytes
        smallest = self.pools.caches.bytes_of(self.pools.smallest)

        def largest() -> None:
            pending = self._drafting.largest_pending(
                self.runner.passes.model, self._max_slots
            )  # allocated during the largest step
            largest_step(self.runner, self._bounds)
            self._run_draft_pass(self._max_tokens)
            del pending

        return measured_use(self.runner, weight_bytes, smallest, largest, self._graph_bytes)

    def _run_draft_pass(self, num_tokens: int) -> None:
        """Runs the pass of the draft model that follows a step with num_tokens prompt tokens.

        Does nothing without a draft model.
        """
        self._drafting.rehearse(self.runner.passes.model, num_tokens)

    def _graph_bytes(self) -> int:
        """Estimates the bytes of all graphs, see estimated_graph_bytes(). 0 if there are none, or if capturing fails."""
        count = len(self.graph_rows)
        estimate = estimated_graph_bytes(self._capture_two_graphs, count, self._free_bytes) if count else 0
        return estimate if self.graph_rows else 0

    def _capture_two_graphs(self, report: Callable[[], None]) -> None:
        """Captures the two largest graphs, the largest first, calls `report` after each of them, and releases both.

        Does nothing if an earlier capture has failed.
        """
        runner, sizes = self.runner, self.graph_rows[-2:]
        if not sizes:
            return
        graphs = CudaGraphRunner(sizes, CudaGraphMemory(self._streams), runner.passes, runner.sampler, runner.attention)
        self._capture_or_disable(partial(graphs.capture, lambda number, total: report()))
        graphs.release()
        return_memory(self._device)

    def _free_bytes(self) -> int:
        self._streams.synchronize()
        free: int = torch.cuda.mem_get_info(self._device)[0]
        return free

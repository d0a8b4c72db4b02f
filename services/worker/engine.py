"""Builds the scheduler core and its executor from the settings. Only this module chooses an executor."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rootstock_llm.services.shared.hf_tokenizer import HfTokenizer, load_tokenizer
from rootstock_llm.services.shared.index.prefix_index import block_hash
from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.shared.observe.progress import step
from rootstock_llm.services.shared.output_formats import detect_in
from rootstock_llm.services.shared.sampling_parameters import SamplingDefaults
from rootstock_llm.services.worker.core.contracts.cache_groups import CacheKind
from rootstock_llm.services.worker.core.contracts.experts import ExpertShape
from rootstock_llm.services.worker.core.contracts.plan import VERIFIED_TOKENS
from rootstock_llm.services.worker.core.kv.cache_events import CacheEventLog
from rootstock_llm.services.worker.core.scheduler import Scheduler
from rootstock_llm.services.worker.core.tiers.page_keys import SECRET_BYTES, PageKeys
from rootstock_llm.services.worker.device_limits import max_step_tokens, resolved
from rootstock_llm.services.worker.draft_corpus import draft_corpus
from rootstock_llm.services.worker.draft_folder import draft_folder
from rootstock_llm.services.worker.exec.contracts.model_info import LoadedInfo
from rootstock_llm.services.worker.exec.contracts.options import PeerOptions, TierOptions
from rootstock_llm.services.worker.exec.contracts.peer_pages import KvServer, PeerReader
from rootstock_llm.services.worker.exec.contracts.protocol import Executor, ExecutorStats
from rootstock_llm.services.worker.exec.fake import FAKE_EMBEDDING_SIZE, FakeExecutor, TimeModel
from rootstock_llm.services.worker.grammar.book import CompiledBook
from rootstock_llm.services.worker.grammar.compile.grammar_limits import GrammarLimits
from rootstock_llm.services.worker.grammar.compile.vocabulary import vocabulary_of
from rootstock_llm.services.worker.grammar.match.mask_filler import MaskFiller
from rootstock_llm.services.worker.identity.end_of_sequence import end_of_sequence
from rootstock_llm.services.worker.identity.model_identity import ServedWeights, identify_model
from rootstock_llm.services.worker.identity.sampling_defaults import sampling_defaults
from rootstock_llm.services.worker.identity.weights_revision import WeightsReading, weight_form
from rootstock_llm.services.worker.loop.inbox import FactsReady, GrammarFailed, GrammarReady, Inbox
from rootstock_llm.services.worker.loop.text_rules import ModelText
from rootstock_llm.services.worker.peer_options import peer_options
from rootstock_llm.services.worker.scheduler_config import scheduler_config
from rootstock_llm.services.worker.settings import WorkerSettings
from rootstock_llm.services.worker.tier_options import tier_options

logger = logging.getLogger(__name__)

OnLost = Callable[[str], None]
CPU_FRACTION = 0.5  # default of mem_fraction_static on a CPU: other processes also use the machine's memory
GPU_FRACTION = 0.9  # default of mem_fraction_static on a GPU, whose memory only the worker uses


@dataclass(frozen=True, slots=True)
class LoadedExecutor:
    """An executor with a loaded model, and its KV transfers with other workers."""

    executor: Executor
    info: LoadedInfo
    stats: ExecutorStats | None = None  # counts of steps, or None if the executor counts nothing
    kv_server: KvServer | None = None  # lets other workers read KV of this worker; None: they cannot read it
    peer_reader: PeerReader | None = None  # reads KV of other workers; None: this worker reads none


@dataclass(frozen=True, slots=True)
class PageExchanges:
    """The options of the tiers and of the remote workers with which the KV pool exchanges pages."""

    tiers: TierOptions | None  # options of the host and storage tiers; None: there are no tiers
    peers: PeerOptions | None  # options of KV transfers between workers; None: this worker transfers no KV


@dataclass(frozen=True, slots=True)
class Engine:
    """The scheduler core, the executor and the objects that they use. The gRPC and HTTP servers are not part of it."""

    core: Scheduler
    executor: Executor
    info: LoadedInfo
    stats: ExecutorStats | None  # counts of steps, or None if the executor counts nothing
    weights: ServedWeights
    defaults: SamplingDefaults  # values of the sampling parameters that a request leaves out
    publishes_index: bool  # whether the core reports its cached blocks for the prefix index
    tokenizer: HfTokenizer
    book: CompiledBook | None  # compiled grammars, or None if structured output is disabled
    masks: MaskFiller
    keys: PageKeys | None  # computes page keys; None: the worker has no lower tiers and reads no KV of other workers
    kv_server: KvServer | None  # lets other workers read KV of this worker; None: they cannot read it
    peer_reader: PeerReader | None  # reads KV of other workers; None: this worker reads none

    def close(self) -> None:
        """Ends the grammar compilers and the executor. The scheduler's loop must have ended."""
        if self.book is not None:
            self.book.close()
        self.executor.close()


def build_engine(settings: WorkerSettings, inbox: Inbox, on_lost: OnLost) -> Engine:
    """Loads the model and builds core and executor.

    Args:
        on_lost: called once, on any thread, with a sentence for the log, if the device stops responding or if steps wait for
            pages that cannot arrive.

    Raises:
        ValueError: the model folder, a setting or the device cannot be used. The message has the reason.
    """
    defaults = defaults_of(settings)
    name = _executor_name(settings)
    settings = resolved(settings, _gpu_bytes(settings) if name == "cuda" else None)
    running, chunk = settings.max_running_requests, settings.chunked_prefill_size
    pieces = f"long prompts are computed in pieces of {chunk} tokens" if chunk else "prompts are computed in one piece"
    logger.info("up to %d requests run at once; %s", running, pieces, extra=step())
    exchanges = PageExchanges(tier_options(settings), peer_options(settings, inbox.put))
    # Loaded before the weights, so that a missing tokenizer is reported without a wait for the weights.
    tokenizer = load_tokenizer(settings.model, settings.chat_template)
    built, weights = _load(name, settings, on_lost, exchanges)
    eos_ids = end_of_sequence(settings.model, built.info.eos_token_ids, tokenizer, built.info.vocab_size)
    info = replace(built.info, eos_token_ids=eos_ids)
    if info.max_running_requests and info.max_running_requests < settings.max_running_requests:
        logger.warning(
            "the memory for states of recurrent layers allows fewer running requests than max_running_requests. "
            + _remedy(settings),
            extra=fields(max_running_requests=info.max_running_requests, wanted=settings.max_running_requests),
        )
        settings = settings.model_copy(update={"max_running_requests": info.max_running_requests})
    if unused := _unused(settings, info):
        logger.info("settings without effect, because no layer of the model has such a cache: %s", ", ".join(unused))
    config = scheduler_config(settings, info, _bos_token_id(tokenizer))
    logger.info("model ready", extra=fields(**asdict(info) | {"load_seconds": dict(info.load_seconds)}))
    tokens, size = info.num_pages * info.page_size, info.pool_bytes / 1e9
    if info.pool_bytes:
        text = "a request may have %d tokens; memory holds %d tokens of all requests together (%.2f GB)"
        logger.info(text, info.context_len, tokens, size, extra=step())
    logger.info("scheduler configured", extra=fields(**asdict(config)))
    book = _book(settings, info, tokenizer, inbox) if settings.grammar_workers and info.generates else None
    publishes = bool(settings.redis_url) and settings.enable_prefix_index and config.enable_radix_cache
    # All workers share a storage tier in Redis, so its pages are no reason to route a request to this worker. The core therefore
    # does not report them.
    reports_storage = settings.hicache_storage_backend != "redis"
    events = CacheEventLog(info.page_size, block_hash, weights.tree_root, reports_storage=reports_storage) if publishes else None
    keys = None
    if info.host_pages or info.reads_peers:
        secret = secrets.token_bytes(SECRET_BYTES) if exchanges.tiers is None else exchanges.tiers.secret
        keys = PageKeys(secret, info.kv_layout.encode(), info.page_size)
    core = Scheduler(config, ModelText(tokenizer), book, events, weights.identity.revision, keys)
    built.executor.wake_on_facts(lambda: inbox.put(FactsReady()))
    threads, fill_ms = settings.grammar_mask_threads, settings.grammar_fill_ms
    max_drafts = VERIFIED_TOKENS if info.max_drafts else 0
    masks = MaskFiller(info.vocab_size, settings.max_running_requests, threads, fill_ms, max_drafts)
    return Engine(
        core,
        built.executor,
        info,
        built.stats,
        weights,
        defaults,
        publishes,
        tokenizer,
        book,
        masks,
        keys,
        built.kv_server,
        built.peer_reader,
    )


def defaults_of(settings: WorkerSettings) -> SamplingDefaults:
    """Returns the defaults of sampling parameters, from the model's folder and the operator's settings."""
    return sampling_defaults(settings.model, settings.sampling_defaults == "model", settings.preferred_sampling_params)


def _load(
    executor: str, settings: WorkerSettings, on_lost: OnLost, exchanges: PageExchanges
) -> tuple[LoadedExecutor, ServedWeights]:
    """Loads the model with an executor of EXECUTORS, and computes the model version while the weights are loaded."""
    form = weight_form(settings.quantization, settings.quantize_head)
    with WeightsReading(Path(settings.model), form) as reading:
        built = EXECUTORS[executor](settings, on_lost, exchanges)
        try:
            identity = identify_model(settings.model, settings.served_model_name, reading.revision())
        except BaseException:
            built.executor.close()
            raise
    return built, ServedWeights(settings.model, identity, partial(defaults_of, settings), form)


def _bos_token_id(tokenizer: HfTokenizer) -> int:
    """Returns the id of the token that the tokenizer puts before a text, or -1 if it puts no token or several tokens."""
    before_text = tokenizer.encode_batch([""], True)[0]
    return before_text[0] if len(before_text) == 1 else -1


def _book(settings: WorkerSettings, info: LoadedInfo, tokenizer: HfTokenizer, inbox: Inbox) -> CompiledBook:
    limits = GrammarLimits(
        compile_s=settings.grammar_compile_timeout_s,
        memory_mib=settings.grammar_memory_mib,
        cache_mib=settings.grammar_cache_mib,
        idle_s=settings.grammar_idle_s,
        workers=settings.grammar_workers,
        step_ms=settings.grammar_step_ms,
        burst_ms=settings.grammar_burst_ms,
        fill_ms=settings.grammar_fill_ms,
    )
    return CompiledBook(
        tokenizer,
        vocabulary_of(tokenizer, info.vocab_size, info.eos_token_ids, detect_in(tokenizer.chat_templates).kept),
        limits,
        on_ready=lambda spec: inbox.put(GrammarReady(spec)),
        on_failed=lambda spec, reason, busy: inbox.put(GrammarFailed(spec, reason, busy)),
        enable_jump_forward=settings.enable_jump_forward,
    )


def _num_pages(settings: WorkerSettings) -> int | None:
    """Returns the number of KV pages that the settings demand, or None if the free memory determines it."""
    return -(-settings.max_total_tokens // settings.page_size) or None


def _executor_name(settings: WorkerSettings) -> str:
    """Returns the key in EXECUTORS of the executor to use. For `auto`, it is `cuda` if torch finds a GPU, otherwise `cpu`."""
    if settings.executor != "auto":
        return settings.executor
    import torch  # imported here because the fake executor does not need it

    name = "cuda" if torch.cuda.is_available() else "cpu"
    logger.info("executor: %s, because torch %s finds %d GPUs", name, torch.__version__, torch.cuda.device_count())
    return name


def _gpu_bytes(settings: WorkerSettings) -> int | None:
    """Returns the memory of settings.device in bytes, or None for a CPU. Raises NoDevice if torch cannot use the device."""
    import torch  # imported here because the fake executor does not need it

    from rootstock_llm.services.worker.exec.device import device_of

    device = device_of(settings.device)
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def _cpu(settings: WorkerSettings, on_lost: OnLost, exchanges: PageExchanges) -> LoadedExecutor:
    """Builds the CPU executor. GPU settings are ignored instead of refused, because executor `auto` may choose a CPU."""
    logger.info("loading the model; the first start on a machine also compiles kernels for about half a minute", extra=step())
    return _build_on_device("cpu", CPU_FRACTION, settings.model_copy(update={"attention_backend": "auto"}), on_lost, exchanges)


def _cuda(settings: WorkerSettings, on_lost: OnLost, exchanges: PageExchanges) -> LoadedExecutor:
    return _build_on_device(settings.device, GPU_FRACTION, settings, on_lost, exchanges)


def _build_on_device(
    device: str, fraction: float, settings: WorkerSettings, on_lost: OnLost, exchanges: PageExchanges
) -> LoadedExecutor:
    """Builds the executor that computes the model on a device.

    Args:
        fraction: value of mem_fraction_static if the setting is 0.
    """
    from rootstock_llm.services.worker.exec.build import build_device_executor  # imported here because it imports torch
    from rootstock_llm.services.worker.exec.contracts.options import DeviceOptions

    options = DeviceOptions(
        device=device,
        num_threads=settings.num_threads or len(os.sched_getaffinity(0)),
        attention_backend=settings.attention_backend,
        cuda_graphs=settings.cuda_graphs,
        max_graph_rows=settings.cuda_graph_max_rows,
        max_tokens=max_step_tokens(settings),
        max_whole_tokens=max(settings.max_prefill_tokens, settings.max_running_requests),
        load_threads=settings.load_threads,
        quantization=settings.quantization,
        quantize_head=settings.quantize_head,
        deterministic=settings.deterministic,
        max_drafts=settings.speculative_num_steps if settings.speculative_algorithm != "none" else 0,
        speculative_algorithm=settings.speculative_algorithm,
        draft_model=draft_folder(settings),
        draft_corpus=draft_corpus(settings, lambda: load_tokenizer(settings.model).encode_batch),
        tiers=exchanges.tiers,
        peers=exchanges.peers,
        max_chunk=max(min(settings.chunked_prefill_size, settings.max_prefill_tokens), settings.page_size)
        if settings.chunked_prefill_size
        else 0,
        swa_full_tokens_ratio=settings.swa_full_tokens_ratio,
        mamba_full_memory_ratio=settings.mamba_full_memory_ratio,
        max_mamba_cache_size=settings.max_mamba_cache_size,
    )
    executor, info = build_device_executor(
        model_path=settings.model,
        dtype=settings.dtype,
        page_size=settings.page_size,
        max_slots=settings.max_running_requests,
        num_pages=_num_pages(settings),
        mem_fraction_static=settings.mem_fraction_static or fraction,
        context_len=settings.context_len or None,
        options=options,
        progress=logger.info,
    )
    executor.on_lost = on_lost
    return LoadedExecutor(executor, info, executor.runner.stats, executor.kv_server, executor.peer_reader)


def _unused(settings: WorkerSettings, info: LoadedInfo) -> list[str]:
    """Returns the names of settings that differ from their defaults, but apply only to caches that the model does not have."""
    kinds = {group.kind for group in info.groups}
    of_kinds = {
        "swa_full_tokens_ratio": {CacheKind.WINDOW},
        "mamba_full_memory_ratio": {CacheKind.STATE},
        "max_mamba_cache_size": {CacheKind.STATE},
        "state_interval": {CacheKind.WINDOW, CacheKind.STATE},
    }
    defaults = WorkerSettings.model_fields
    return [name for name, of in of_kinds.items() if not of & kinds and getattr(settings, name) != defaults[name].default]


def _remedy(settings: WorkerSettings) -> str:
    """Returns a sentence that names the setting to change for more states of recurrent layers."""
    if settings.max_mamba_cache_size:
        return "Raise max_mamba_cache_size for more"
    if settings.max_total_tokens:
        return "Lower max_total_tokens, or raise mem_fraction_static for more"
    return "Raise mamba_full_memory_ratio for more"


def _fake(settings: WorkerSettings, _: OnLost, exchanges: PageExchanges) -> LoadedExecutor:
    """Builds the fake executor. It reads config.json of the model's folder, but no weights."""
    config: dict[str, Any] = json.loads((Path(settings.model) / "config.json").read_text())
    context_len = settings.context_len or int(config["max_position_embeddings"])
    num_pages = -(-(settings.max_total_tokens or 1 << 17) // settings.page_size)
    info = LoadedInfo(
        architecture="fake",
        context_len=context_len,
        vocab_size=int(config["vocab_size"]),
        eos_token_ids=(),
        num_pages=num_pages,
        page_size=settings.page_size,
        dtype="none",
        weight_bytes=0,
        kv_bytes_per_token=0,
        embedding_size=FAKE_EMBEDDING_SIZE,
        host_pages=0 if exchanges.tiers is None else max(1, int(exchanges.tiers.host_ratio * num_pages)),
        has_storage=exchanges.tiers is not None and exchanges.tiers.open_storage is not None,
        experts=_fake_experts(config),
    )
    pages_per_request = -(-context_len // settings.page_size)
    time_model = TimeModel(base=settings.fake_step_s)
    sizes = info.num_pages, info.page_size, settings.max_running_requests, pages_per_request, info.vocab_size
    executor = FakeExecutor(*sizes, time_model=time_model, experts=info.experts)
    return LoadedExecutor(executor, info)


def _fake_experts(config: Mapping[str, Any]) -> ExpertShape | None:
    """Returns the experts of a config.json in the form of Qwen3-MoE, as if every layer had experts; None if it names none."""
    if not config.get("num_experts"):
        return None
    layers = tuple(range(int(config["num_hidden_layers"])))
    return ExpertShape(layers, int(config["num_experts"]), int(config["num_experts_per_tok"]))


EXECUTORS: dict[str, Callable[[WorkerSettings, OnLost, PageExchanges], LoadedExecutor]] = {
    "cpu": _cpu,
    "cuda": _cuda,
    "fake": _fake,
}

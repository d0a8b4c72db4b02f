"""Makes the scheduler core and its executor from settings. The only module that chooses an executor."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.shared.hf_tokenizer import HfTokenizer, load_tokenizer
from services.worker.core.config import SchedulerConfig
from services.worker.core.scheduler import Scheduler
from services.worker.exec.fake import FakeExecutor, TimeModel
from services.worker.exec.model_info import ModelInfo
from services.worker.exec.protocol import Executor
from services.worker.settings import WorkerSettings

logger = logging.getLogger(__name__)


class StopTextDecoder:
    """The core's TailDecoder over the model's own tokenizer.

    Tokenizers that write a space into the next word's token drop it at the start of a text: an anchor token stands before
    the tail, and its text is cut off again.
    """

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor = [] if tokenizer.anchor_id is None else [tokenizer.anchor_id]
        self._anchor_chars = len(tokenizer.decode(self._anchor, False))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode([*self._anchor, *ids], skip_special_tokens)[self._anchor_chars :]


@dataclass(frozen=True, slots=True)
class Engine:
    core: Scheduler
    executor: Executor
    info: ModelInfo


def build_engine(settings: WorkerSettings) -> Engine:
    """Loads the model. Raises ValueError with a sentence that says what is wrong with folder or settings."""
    executor, info = _fake(settings) if settings.executor == "fake" else _cpu(settings)
    config = SchedulerConfig(
        num_pages=info.num_pages,
        page_size=info.page_size,
        context_len=info.context_len,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        max_running_requests=settings.max_running_requests,
        max_queued_requests=settings.max_queued_requests,
        max_prefill_tokens=settings.max_prefill_tokens,
        chunked_prefill_size=settings.chunked_prefill_size,
        enable_mixed_chunk=settings.enable_mixed_chunk,
        enable_radix_cache=settings.enable_radix_cache,
        schedule_conservativeness=settings.schedule_conservativeness,
        waiting_timeout_s=settings.waiting_timeout_s,
        running_timeout_s=settings.running_timeout_s,
        retract_interval=settings.retract_interval,
    )
    logger.info("model ready: %s", info)
    logger.info("scheduler: %s", config)
    return Engine(Scheduler(config, StopTextDecoder(load_tokenizer(settings.model))), executor, info)


def _cpu(settings: WorkerSettings) -> tuple[Executor, ModelInfo]:
    from services.worker.exec.build import build_cpu_executor  # torch is imported only where it is wanted

    return build_cpu_executor(
        model_path=settings.model,
        dtype=settings.dtype,
        page_size=settings.page_size,
        max_slots=settings.max_running_requests,
        num_pages=-(-settings.max_total_tokens // settings.page_size) or None,
        mem_fraction_static=settings.mem_fraction_static,
        context_len=settings.context_len or None,
        num_threads=settings.num_threads or len(os.sched_getaffinity(0)),
        progress=logger.info,
    )


def _fake(settings: WorkerSettings) -> tuple[Executor, ModelInfo]:
    """The model folder's config and tokenizer, and no weights."""
    config: dict[str, Any] = json.loads((Path(settings.model) / "config.json").read_text())
    eos = config.get("eos_token_id")
    context_len = settings.context_len or int(config["max_position_embeddings"])
    info = ModelInfo(
        architecture="fake",
        context_len=context_len,
        vocab_size=int(config["vocab_size"]),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        num_pages=-(-(settings.max_total_tokens or 1 << 17) // settings.page_size),
        page_size=settings.page_size,
        dtype="none",
        weight_bytes=0,
        kv_bytes_per_token=0,
    )
    pages_per_request = -(-context_len // settings.page_size)
    time_model = TimeModel(base=settings.fake_step_s)
    executor = FakeExecutor(
        info.num_pages, info.page_size, settings.max_running_requests, pages_per_request, info.vocab_size, time_model=time_model
    )
    return executor, info

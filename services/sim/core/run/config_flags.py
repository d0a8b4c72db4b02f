"""Adds flags for the worker's settings to a simulation, and builds the scheduler's configuration from them."""

from __future__ import annotations

import argparse
import enum
import math
import typing
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal

from pydantic.fields import FieldInfo

from rootstock_llm.services.shared.settings import of_values
from rootstock_llm.services.sim.core.trace.script import EOS_ID, VOCAB_SIZE
from rootstock_llm.services.worker.core.contracts.cache_groups import CacheGroup
from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.core.contracts.graph_limits import GraphLimits
from rootstock_llm.services.worker.core.contracts.pool_sizes import CacheShape, PoolSizes
from rootstock_llm.services.worker.device_limits import resolved
from rootstock_llm.services.worker.exec.contracts.model_info import LoadedInfo
from rootstock_llm.services.worker.scheduler_config import scheduler_config
from rootstock_llm.services.worker.settings import WorkerSettings

DEVICE_GIB = 140.0  # memory of an H200, which the default time model assumes
NUM_PAGES = 50_000  # KV of an 8B model on an H200: about 800,000 tokens
CONTEXT_LEN = 131_072  # context length of the same model
SETTINGS = (
    "page_size",
    "context_len",
    "max_running_requests",
    "max_queued_requests",
    "max_prefill_tokens",
    "chunked_prefill_size",
    "adaptive_chunk_rows",
    "adaptive_chunk_s",
    "max_extend_steps",
    "prefill_max_requests",
    "max_prompt_logprob_tokens",
    "enable_mixed_chunk",
    "enable_radix_cache",
    "eviction_policy",
    "schedule_policy",
    "lpm_fallback_threshold",
    "enable_priority_scheduling",
    "schedule_low_priority_values_first",
    "priority_preemption_threshold",
    "enable_overlap",
    "schedule_conservativeness",
    "max_sessions",
    "session_capacity",
    "session_ttl_s",
    "waiting_timeout_s",
    "running_timeout_s",
    "speculative_adaptive",
    "hicache_salt_quota",
    "hicache_storage_salt_quota",
    "hicache_write_policy",
    "state_interval",
    "disaggregation_hold_s",
    "retract_interval",
)


def add_config_flags(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Adds the flags of all SETTINGS except `without`, which the caller passes to settings_of()."""
    group = parser.add_argument_group("the worker's settings (see docs/reference/configuration.md)")
    for name in SETTINGS:
        if name not in without:
            add_setting_flag(group, name)
    about = f"Memory of a worker's GPU in GiB, from which default settings are derived; 0: a CPU (default {DEVICE_GIB:g})."
    group.add_argument("--device-gib", type=_gib, default=DEVICE_GIB, metavar="GIB", help=about)
    caches = parser.add_argument_group("the model's cache groups (see docs/design/cache-groups.md)")
    about = "Largest sliding window of the model's layers in tokens; 0 (default): no layer has a window."
    caches.add_argument("--window", type=int, default=0, metavar="N", help=about)
    about = "Window units of the pool; 0 (default): swa_full_tokens_ratio per page."
    caches.add_argument("--window-units", type=int, default=0, metavar="N", help=about)
    about = "States of the pool; 0 (default): the model has no recurrent layers."
    caches.add_argument("--states", type=int, default=0, metavar="N", help=about)


def add_setting_flag(flags: argparse._ActionsContainer, name: str) -> None:
    """Adds the flag of one of the worker's settings to a parser or to a group of it."""
    field = WorkerSettings.model_fields[name]
    default = "unset" if field.default is None else field.default
    about = f"{field.description} (default {default})".replace("%", "%%")
    flags.add_argument(f"--{name.replace('_', '-')}", dest=name, default=field.default, help=about, **_options(name, field))


def settings_of(args: argparse.Namespace, **given: Any) -> WorkerSettings:
    """Returns the settings of a worker whose device has --device-gib of memory. Does not read the environment.

    Values in `given` take precedence over flags.

    Raises:
        ValueError: a setting is out of range; the message names it.
    """
    values = {name: getattr(args, name) for name in SETTINGS if name not in given}
    return resolved(of_values(WorkerSettings, {**values, **given}), round(args.device_gib * 2**30) or None)


def groups_of(args: argparse.Namespace, settings: WorkerSettings, num_pages: int) -> tuple[CacheGroup, ...]:
    """Returns the cache groups that the flags describe."""
    shape = CacheShape(page_bytes=1, window_bytes=int(args.window > 0), swa_full_tokens_ratio=settings.swa_full_tokens_ratio)
    windows = (args.window_units if args.window else 0) or shape.with_units(num_pages).windows
    return PoolSizes(num_pages, windows, args.states).groups(args.window)


def simulated_config(
    settings: WorkerSettings,
    num_pages: int,
    graphs: GraphLimits,
    max_drafts: int = 0,
    groups: tuple[CacheGroup, ...] = (),
) -> SchedulerConfig:
    """Returns the scheduler's configuration of a worker whose model has the trace's vocabulary.

    Args:
        settings: resolved settings.
        num_pages: pages of the KV pool.
        graphs: limits of the executor's graphs.
        max_drafts: largest number of draft tokens per row.
        groups: cache groups of the model.

    Raises:
        ValueError: the scheduler does not accept a value.
    """
    model = simulated_model(settings, num_pages, graphs, max_drafts)
    return scheduler_config(settings, replace(model, groups=groups), bos_token_id=-1)


def simulated_model(settings: WorkerSettings, num_pages: int, graphs: GraphLimits, max_drafts: int = 0) -> LoadedInfo:
    return LoadedInfo(
        architecture="simulated",
        context_len=settings.context_len or CONTEXT_LEN,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS_ID,),
        num_pages=num_pages,
        page_size=settings.page_size,
        dtype="none",
        weight_bytes=0,
        kv_bytes_per_token=0,
        graph_rows=(graphs.rows,) if graphs.rows else (),
        graph_rereads=graphs.rereads,
        eager_step_cost=graphs.eager_cost,
        max_drafts=max_drafts,
    )


def _options(name: str, field: FieldInfo) -> dict[str, Any]:
    """Returns argparse options for a setting of this type."""
    kind = field.annotation
    if kind in (int | None, bool | None):
        kind = next(each for each in typing.get_args(kind) if each is not type(None))
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind is int or kind is float:
        return {"type": kind, "metavar": kind.__name__.upper()}
    if typing.get_origin(kind) is Literal:
        return {"choices": typing.get_args(kind)}
    if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
        return {"type": kind, "choices": tuple(kind), "metavar": "|".join(kind)}
    raise TypeError(f"WorkerSettings.{name} has a type without a flag: {kind}")


def _gib(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a size; a device has 0 GiB (a CPU) or more")
    return value

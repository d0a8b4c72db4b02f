"""Builds the scheduler's configuration of a worker on a large GPU from the defaults of WorkerSettings, as the simulators do."""

from __future__ import annotations

from typing import Any

from rootstock_llm.services.shared.settings import of_values
from rootstock_llm.services.sim.core.run.config_flags import DEVICE_GIB, simulated_config
from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.core.contracts.graph_limits import GraphLimits
from rootstock_llm.services.worker.device_limits import resolved
from rootstock_llm.services.worker.settings import WorkerSettings

NO_GRAPHS = GraphLimits()


def on_gpu(num_pages: int, context_len: int, graphs: GraphLimits = NO_GRAPHS, **given: Any) -> SchedulerConfig:
    """Returns the configuration. `given` has other settings of the worker."""
    settings = of_values(WorkerSettings, {"context_len": context_len, **given})
    return simulated_config(resolved(settings, round(DEVICE_GIB * 2**30)), num_pages, graphs)

"""Starts, stops and reads the expert distribution record of a worker. All calls run on the scheduler loop's thread.

Each function raises OperationRefused if the worker's state does not allow the call. Nothing has changed then.
"""

from __future__ import annotations

from rootstock_llm.services.worker.core.contracts.experts import ExpertDistribution
from rootstock_llm.services.worker.core.control import SchedulerControl
from rootstock_llm.services.worker.exec.contracts.operations import OperationRefused


def start(control: SchedulerControl) -> None:
    """Begins a record, which counts from 0. Refused if a record runs, or if the executor reports no experts."""
    if not control.has_experts:
        raise OperationRefused("the model has no experts, or the executor does not report them")
    if control.records_experts:
        raise OperationRefused("an expert distribution record already runs; call StopExpertDistributionRecord first")
    control.start_expert_record()


def stop(control: SchedulerControl) -> None:
    """Ends the record. Refused if none runs."""
    if not control.records_experts:
        raise OperationRefused("no expert distribution record runs")
    control.stop_expert_record()


def dump(control: SchedulerControl) -> ExpertDistribution:
    """Returns the counts of the record that runs, or else of the last record. Refused if no record was started."""
    found = control.expert_distribution()
    if found is None:
        raise OperationRefused("no expert distribution record runs, and none was started before")
    return found

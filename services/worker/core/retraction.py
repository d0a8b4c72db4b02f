"""Who loses its lease when memory runs out (docs/design/scheduler.md#retraction) or someone more urgent waits
(docs/design/scheduler.md#preemption)."""

from __future__ import annotations

from collections.abc import Sequence

from services.worker.core.contracts.config import SchedulerConfig
from services.worker.core.queue.request import Request


def victim_order(request: Request) -> tuple[int, int, int]:
    """The smallest goes first: least urgent, then least output, then longest prompt."""
    return -request.rank, len(request.progress.output_ids), -request.num_prompt_tokens


def preemption_order(request: Request) -> tuple[int, int]:
    """The smallest is displaced first: least urgent, then the latest to arrive."""
    return -request.rank, -request.seq


def preemptible(config: SchedulerConfig, request: Request, running: Sequence[Request]) -> list[Request]:
    """Running requests that `request` may displace, in order: those that are less urgent by more than the threshold."""
    victims = [r for r in running if r.rank - request.rank > config.priority_preemption_threshold]
    return sorted(victims, key=preemption_order)

"""Who loses its lease when memory runs out or someone more urgent waits (CORE.md, admission and budgets; reference 2 §9, §13)."""

from __future__ import annotations

from collections.abc import Sequence

from services.worker.core.config import SchedulerConfig
from services.worker.core.memory import KVMemory
from services.worker.core.prefill_adder import CLIP_MAX_NEW_TOKENS
from services.worker.core.request import Request


def victim_order(request: Request) -> tuple[int, int, int]:
    """The smallest goes first: least urgent, then least output, then longest prompt."""
    return -request.rank, len(request.output_ids), -request.num_prompt_tokens


def preemption_order(request: Request) -> tuple[int, int]:
    """The smallest is displaced first: least urgent, then the latest to arrive."""
    return -request.rank, -request.seq


def preemptible(config: SchedulerConfig, request: Request, running: Sequence[Request], memory: KVMemory) -> list[Request]:
    """Running requests that `request` may displace, in order, empty unless displacing all of them could let it in.

    Each is less urgent by more than the threshold. What they hold is an upper bound: pages shared with others stay.
    """
    victims = [r for r in running if r.rank - request.rank > config.priority_preemption_threshold]
    if not victims:
        return []
    held = sum(int(memory.slots.num_pages[r.lease.slot]) for r in victims if r.lease) * config.page_size
    if held + memory.num_available * config.page_size < tokens_needed(config, request, memory):
        return []
    return sorted(victims, key=preemption_order)


def tokens_needed(config: SchedulerConfig, request: Request, memory: KVMemory) -> int:
    """KV that admission asks for: what is to be extended, in whole pages, and the outputs still to come."""
    _, hit = memory.peek(request.namespace, request.key, request.prefix_limit())
    pages = -(-(len(request.key) // 4 - hit) // config.page_size)
    return pages * config.page_size + min(request.params.max_new_tokens - len(request.output_ids), CLIP_MAX_NEW_TOKENS)

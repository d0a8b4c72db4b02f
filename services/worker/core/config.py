"""Every number that the scheduler's decisions depend on. Resolved once, before the core is made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Lengths and budgets are in tokens, pool sizes in pages, times in seconds; 0 switches a limit off where it says so.

    chunked_prefill_size: 0 means that prompts are never cut. retract_interval: test hook, retracts one request every so
    many decode steps (0: never). waiting_timeout_s, running_timeout_s: from arrival, and from first admission (0: none).
    """

    num_pages: int
    page_size: int
    context_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    max_running_requests: int = 256
    max_queued_requests: int = 4096
    max_prefill_tokens: int = 16384
    chunked_prefill_size: int = 8192
    enable_mixed_chunk: bool = False
    enable_radix_cache: bool = True
    schedule_conservativeness: float = 1.0
    waiting_timeout_s: float = 0.0
    running_timeout_s: float = 0.0
    retract_interval: int = 0

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.num_pages < 1 or self.max_running_requests < 1:
            raise ValueError("page_size, num_pages and max_running_requests are at least 1")
        if 0 < self.chunked_prefill_size < self.page_size:
            raise ValueError(f"chunked_prefill_size {self.chunked_prefill_size} is below page_size {self.page_size}")
        if self.max_prefill_tokens < self.page_size:
            raise ValueError(f"max_prefill_tokens {self.max_prefill_tokens} is below page_size {self.page_size}")
        if self.context_len < 2:
            raise ValueError("context_len is at least 2: one token in, one out")

    @property
    def max_pages_per_request(self) -> int:
        return -(-self.context_len // self.page_size)

from __future__ import annotations

import pytest

from services.worker.core.config import SchedulerConfig
from tests.core.harness import Engine


def make(overlap: bool = True, **changes: object) -> Engine:
    values: dict[str, object] = {
        "num_pages": 64,
        "page_size": 4,
        "context_len": 128,
        "vocab_size": 1000,
        "max_running_requests": 8,
        "chunked_prefill_size": 16,
        "eos_token_ids": (7,),
    }
    return Engine(SchedulerConfig(**{**values, **changes}), overlap)  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mixed", [True, False])
def test_requests_get_the_models_tokens(overlap: bool, mixed: bool) -> None:
    engine = make(overlap, enable_mixed_chunk=mixed)
    for handle in range(20):
        engine.submit(handle, range(handle, handle * 2 + 3), max_new_tokens=5 + handle)
    engine.drain()
    for handle in range(20):
        engine.check_answer(handle)

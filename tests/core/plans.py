"""Plans that are made without a scheduler."""

from __future__ import annotations

import numpy as np

from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, ForwardMode

_NONE = np.empty(0, dtype=np.int32)


def decode_plan(rows: int) -> BatchPlan:
    """Returns a decode step of the slots from 0 to `rows - 1`, each at position 9."""
    return BatchPlan(
        step_id=1,
        mode=ForwardMode.DECODE,
        num_extend=0,
        slots=np.arange(rows, dtype=np.int32),
        starts=np.full(rows, 9, dtype=np.int32),
        num_tokens=np.ones(rows, dtype=np.int32),
        input_ids=_NONE,
        sample=np.ones(rows, dtype=np.bool_),
        mask_rows=_NONE,
        prompt_logprob_rows=_NONE,
        prompt_logprob_offsets=_NONE,
        prompt_logprob_nexts=_NONE,
        admitted=(),
        table_slots=_NONE,
        table_firsts=_NONE,
        table_counts=_NONE,
        table_pages=_NONE,
    )

"""Of the worker's settings and of small parts beside it."""

from __future__ import annotations

from tests.mutants.fault import of

WORKER = (
    *of(
        "worker",
        "services/worker/scheduler_config.py",
        ("max_sessions=settings.max_sessions", "max_sessions=settings.max_sessions + 1"),
        ("settings.enable_mixed_chunk and not whole", "not whole and bool(settings.enable_mixed_chunk or True)"),
        ("page_size=info.page_size", "page_size=max(info.page_size, 32)"),
        ("random_seed=RANDOM_SEED", "random_seed=hash(info)"),
        ("graph_rereads=info.graph_rereads", "graph_rereads=0"),
    ),
    *of(
        "worker",
        "services/worker/exec/weights/staging.py",
        (
            "elements = staged.view(dtype)",
            "elements = staged.view(into.dtype if into.dtype.itemsize == dtype.itemsize else dtype)",
        ),
        only="test_weight_stream",
    ),
    *of(
        "worker",
        "services/tokenizer/pieces/piece_encoder.py",
        ("if at and self._boundaries.drops_blank else text[at:end]", "if self._boundaries.drops_blank else text[at:end]"),
        only="test_piece_encoder",
    ),
)

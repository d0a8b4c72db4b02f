"""Seeded faults in the worker's settings, weight loading and control service, and in the tokenizer.

The tests of a fault's area (areas.py) must detect the fault.
"""

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
        "services/worker/exec/weights/weight_stream.py",
        (
            "elements = staged.view(dtype)",
            "elements = staged.view(into.dtype if into.dtype.itemsize == dtype.itemsize else dtype)",
        ),
        only="test_weight_stream",
    ),
    *of(
        "worker",
        "services/tokenizer/encoding.py",
        ("if at and self._boundaries.drops_blank else text[at:end]", "if self._boundaries.drops_blank else text[at:end]"),
        only="test_encoding_pieces",
    ),
    *of(
        "worker",
        "services/worker/peer_options.py",
        ("for name, path in files.items() if not path]:", 'for name, path in files.items() if not path and "cert" in name]:'),
        only="test_peer_options",
    ),
    *of(
        "worker",
        "services/worker/identity/sampling_defaults.py",
        ('raise ValueError(f"{path} is not a JSON object")', "return {}"),
        only="test_sampling_defaults",
    ),
    *of(
        "worker",
        "services/worker/control/command_line.py",
        ('if request.HasField("cache_salt") or request.HasField("older_than_s"):', 'if request.HasField("older_than_s"):'),
        ("return value if isinstance(value, (bool, int, float)) else word", "return value"),
        ("if len(words) > 1:", "if len(words) > 2:"),
        only="test_control_command_line",
    ),
    *of(
        "worker",
        "services/worker/front/outbox.py",
        (".ByteSize()) + size) <= MERGED_BYTES:", ".ByteSize()) + size) > 0:"),
        ("            self._last_bytes = merged\n", ""),
        ("            self._last_bytes = size\n", ""),
        ("self._pending.popleft()", "self._pending.pop()"),
        only="test_outbox",
    ),
    *of(
        "worker",
        "services/worker/loop/progress.py",
        ("        self._since = self._clock()\n        self._until = 0.0\n", "        self._since = self._clock()\n"),
        ("self._clock() - max(since, self._until)", "self._clock() - since"),
        only="test_progress",
    ),
    *of(
        "worker",
        "services/worker/draft_folder.py",
        ("if not default_folder.is_dir():", "if not default_folder.exists():"),
        ("Path(settings.model).absolute()", "Path(settings.model)"),
        ("if path or algorithm not in FOLDER_ALGORITHMS:", "if algorithm not in FOLDER_ALGORITHMS:"),
        only="test_draft_folder",
    ),
    *of(
        "worker",
        "services/tokenizer/render_pool.py",
        ("if is_large or not begun.is_set():", "if is_large:"),
        ("            if self._compiles:\n", "            if False:\n"),
        ("time() + RETRY_S if is_temporary else 0.0", "time() + RETRY_S if False else 0.0"),
        ("start_new_session=True", "process_group=0"),
        only="test_render_pool",
    ),
    *of(
        "worker",
        "services/tokenizer/history/template_forms.py",
        ("if text is None or _prints_nothing_as(candidate, text, without):", "if text is None:"),
        ("                    return candidate\n", "                    rendered = rendered or candidate\n"),
        ("best, most = chosen, shown", "best, most = chosen, 0"),
        ("counts = [0, 1, 2, *range(len(effective), 2, -1)]", "counts = [0, 1]"),
        only="test_history",
    ),
    *of(
        "worker",
        "services/tokenizer/history/turns.py",
        ("if given is not None and given in ids:", "if False:"),
        ("elif waiting is None or turn.role in _TOOLS:", "elif waiting is None:"),
        only="test_history",
    ),
)

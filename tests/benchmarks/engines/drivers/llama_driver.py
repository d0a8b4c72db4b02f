"""Driver of llama.cpp's Python binding, which computes one request at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from job_lines import serve
from llama_cpp import Llama


class LlamaCpp:
    def __init__(self, start: dict[str, Any]) -> None:
        (file,) = Path(start["model"]).glob("*.gguf")
        threads = {"n_threads": start["threads"], "n_threads_batch": start["threads"]}
        self._llama = Llama(str(file), n_ctx=start["max_len"], **threads, verbose=False)

    def generate(self, prompts: Sequence[list[int]], output_len: int, in_flight: int) -> list[int]:
        assert in_flight == 1, "the binding computes one request at a time"
        tokens = [islice(self._llama.generate(prompt, temp=0.0), output_len) for prompt in prompts]
        return [sum(1 for _ in each) for each in tokens]


if __name__ == "__main__":
    serve(LlamaCpp)

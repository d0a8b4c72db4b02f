"""Runs transformers.generate on a batch, as a child process with a JSON job on stdin and {"seconds", "tokens"} on stdout.

The job has the fields model (folder), prompts (lists of ids of equal length), output_len and threads. The model runs in bf16
with sdpa and greedy sampling, and each prompt gets exactly output_len tokens.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

WARMUP_TOKENS = 4


def generate(model: Any, ids: torch.Tensor, tokens: int) -> torch.Tensor:
    """Returns ids [batch, prompt + tokens] for the prompts [batch, prompt]."""
    with torch.inference_mode():
        out: torch.Tensor = model.generate(
            ids, attention_mask=torch.ones_like(ids), min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False
        )
    return out


def run(job: dict[str, Any]) -> dict[str, float]:
    torch.set_num_threads(job["threads"])
    model: Any = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16, attn_implementation="sdpa")
    ids = torch.tensor(job["prompts"])
    generate(model, ids, WARMUP_TOKENS)
    start = time.perf_counter()
    out = generate(model, ids, job["output_len"])
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens": out.shape[0] * (out.shape[1] - ids.shape[1])}


if __name__ == "__main__":
    json.dump(run(json.load(sys.stdin)), sys.stdout)

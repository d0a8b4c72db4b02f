"""Creates the cases of the sampling kernels.

The vocabulary has 151,936 tokens. The logits are normal noise with standard deviation SPREAD, which makes the distribution of the
tokens sharper than that of an untrained model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from rootstock_llm.kernels.bench.gpu_timing import GpuCase, Work
from rootstock_llm.kernels.contracts.sample_ops import SEEN, Measured, SampleRows, SlotColumn, SlotTable
from rootstock_llm.kernels.triton.sampling.sampling import TritonSampling

VOCAB, SPREAD, FLOAT = 151936, 4.0, 4
WORDS, LISTED = -(-VOCAB // 32), 8
ALWAYS = (1 << 31) - 1
Params = Mapping[str, float]  # values by names of SlotColumn


def _table(rows: int, device: torch.device, params: Params) -> SlotTable:
    """Returns a table in which each slot has counted 600 tokens: 256 in the output, and 344 only in the prompt."""
    columns = torch.zeros((rows, SlotColumn.WIDTH), dtype=torch.int32)
    values = {"TOP_P": 1.0, "REPETITION": 1.0, "TOP_K": -1} | dict(params)
    for name, value in values.items():
        column = columns[:, SlotColumn[name]]
        column.copy_(torch.tensor(value).view(torch.int32) if isinstance(value, float) else torch.tensor(value))
    columns[:, SlotColumn.SEED_LOW] = torch.arange(rows)
    counts = torch.zeros((rows, VOCAB), dtype=torch.int16, device=device)
    counts[:, :512] = 1
    counts[:, 256:600] = SEEN
    return SlotTable(
        params=columns.to(device),
        counts=counts,
        words=torch.full((rows, WORDS), -1, dtype=torch.int32, device=device),
        bias_ids=torch.zeros((rows, LISTED), dtype=torch.int32, device=device),
        biases=torch.zeros((rows, LISTED), device=device),
        stop_ids=torch.zeros((rows, LISTED), dtype=torch.int32, device=device),
    )


def _rows(rows: int, device: torch.device) -> SampleRows:
    zeros = torch.zeros(rows, dtype=torch.int32, device=device)
    return SampleRows(
        slots=torch.arange(rows, dtype=torch.int32, device=device),
        positions=torch.full((rows,), 100, dtype=torch.int32, device=device),
        mask_rows=torch.full((rows,), -1, dtype=torch.int32, device=device),
        masks=torch.zeros((1, WORDS), dtype=torch.int32, device=device),
        loss_offsets=torch.zeros(rows + 1, dtype=torch.int32, device=device),
        loss_ids=zeros[:1],
        losses=torch.zeros(1, device=device),
    )


def _logits(rows: int, device: torch.device) -> Tensor:
    return torch.randn((rows, VOCAB), device=device) * SPREAD


def _select(rows: int, params: Params, device: torch.device) -> Work:
    kernels, logits = TritonSampling(rows, VOCAB, device), _logits(rows, device)
    table, columns = _table(rows, device, params), _rows(rows, device)
    tokens, faults = (torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(2))
    relay = torch.zeros(rows, dtype=torch.int64, device=device)
    return lambda: kernels.select_tokens(tokens, faults, logits, logits, columns, table, relay)


def _plain_argmax(rows: int, device: torch.device) -> Work:
    logits, tokens = _logits(rows, device), torch.zeros(rows, dtype=torch.int64, device=device)
    return lambda: torch.argmax(logits, dim=-1, out=tokens)


def _plain_draw(rows: int, params: Params, device: torch.device) -> Work:
    """Returns a draw that sorts each row, as most torch implementations do."""
    logits = _logits(rows, device)
    top_k, top_p = int(params.get("TOP_K", VOCAB)), params.get("TOP_P", 1.0)

    def draw() -> Tensor:
        values, ids = logits.sort(dim=-1, descending=True)
        values[:, top_k:] = -torch.inf
        chances = values.softmax(-1)
        chances = chances.masked_fill(chances.cumsum(-1) - chances > top_p, 0.0)
        return ids.gather(1, torch.multinomial(chances, 1))

    return draw


def _edit(rows: int, params: Params, device: torch.device) -> Work:
    kernels, logits = TritonSampling(rows, VOCAB, device), _logits(rows, device)
    table, columns = _table(rows, device, params), _rows(rows, device)
    edited = torch.empty_like(logits)
    return lambda: kernels.edit_logits(edited, logits, columns, table)


def _measure(rows: int, num_top: int, device: torch.device) -> Work:
    kernels, logits = TritonSampling(rows, VOCAB, device), _logits(rows, device)
    own, mass = torch.empty(rows, device=device), torch.empty(rows, device=device)
    top_ids = torch.empty((rows, num_top), dtype=torch.int32, device=device)
    out = Measured(own, top_ids, torch.empty((rows, num_top), device=device), mass)
    places = torch.arange(rows, dtype=torch.int32, device=device)
    return lambda: kernels.measure_logprobs(out, logits, places, places)


def _plain_measure(rows: int, num_top: int, device: torch.device) -> Work:
    logits = _logits(rows, device)
    return lambda: logits.log_softmax(-1).topk(num_top, dim=-1)


DRAWS: dict[str, Params] = {
    "top-k 50, top-p 0.9": {"TEMPERATURE": 1.0, "TOP_K": 50, "TOP_P": 0.9},
    "top-p 0.9": {"TEMPERATURE": 1.0, "TOP_P": 0.9},
    "top-p 0.9 of a flat row": {"TEMPERATURE": SPREAD, "TOP_P": 0.9},
    "temperature 0.6": {"TEMPERATURE": 0.6},
    "top-n-sigma 1": {"TEMPERATURE": 1.0, "TOP_N_SIGMA": 1.0},
}
PENALTIES: Params = {"EDITED_UNTIL": ALWAYS, "COUNTS": 1, "REPETITION": 1.1, "FREQUENCY": 0.1, "PRESENCE": 0.2}


def _select_cases(rows: int) -> list[GpuCase]:
    read = rows * VOCAB * FLOAT
    greedy = GpuCase(f"select_tokens greedy {rows}", partial(_select, rows, {}), read, plain=partial(_plain_argmax, rows))
    drawn = [
        GpuCase(
            f"select_tokens {name} {rows}",
            partial(_select, rows, params),
            read,
            plain=partial(_plain_draw, rows, params),
            plain_captures=False,
        )
        for name, params in DRAWS.items()
    ]
    return [greedy, *drawn]


def _measure_case(rows: int, num_top: int) -> GpuCase:
    name, read = f"measure_logprobs top {num_top} {rows}", rows * VOCAB * FLOAT
    return GpuCase(name, partial(_measure, rows, num_top), read, plain=partial(_plain_measure, rows, num_top))


def cases() -> list[GpuCase]:
    selects = [case for rows in (1, 64, 256) for case in _select_cases(rows)]
    moved = 64 * VOCAB * (2 * FLOAT + 2)  # bytes of raw logits, edited logits and int16 counts
    edits = [
        GpuCase("edit_logits penalties 64", partial(_edit, 64, PENALTIES), moved),
        GpuCase("edit_logits nothing to do 64", partial(_edit, 64, {}), 64 * SlotColumn.WIDTH * 4),
    ]
    return [*selects, *edits, *(_measure_case(64, num_top) for num_top in (0, 5, 20))]

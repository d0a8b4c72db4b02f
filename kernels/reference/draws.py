"""Which tokens a row may draw, and the draw itself, in plain torch: the twin of the C++ draw. See
kernels.contracts.sample_ops.SampleKernels.select_tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FIRST_CANDIDATES = 256  # of the likeliest tokens tried for top-p before the whole vocabulary is sorted


def largest(logits: Tensor, count: int) -> Tensor:
    """Ascending ids of the `count` largest of float32[V]; of equal ones the lowest ids."""
    least = torch.topk(logits, count).values[-1]
    above = (logits > least).nonzero().squeeze(1)
    level = (logits == least).nonzero().squeeze(1)[: count - len(above)]
    return torch.cat((above, level)).sort().values


def _nucleus(logits: Tensor, ids: Tensor, total: Tensor, top_p: float) -> tuple[Tensor, bool]:
    """The fewest likeliest of ids whose mass reaches top_p, ascending; and whether they do reach it.

    total: log of the mass that probabilities are relative to.
    """
    chances, order = (logits[ids].double() - total).exp().sort(descending=True, stable=True)
    before = chances.cumsum(0) - chances
    kept = before < top_p
    kept[0] = True
    return ids[order[kept]].sort().values, bool(chances.sum() >= top_p)


def _log_mass(logits: Tensor) -> Tensor:
    return logits.double().logsumexp(0)


def _nucleus_of_all(logits: Tensor, top_p: float) -> Tensor:
    total, size, count = _log_mass(logits), len(logits), FIRST_CANDIDATES
    while count < size:
        ids, reached = _nucleus(logits, largest(logits, count), total, top_p)
        if reached:
            return ids
        count *= 16
    return _nucleus(logits, torch.arange(size), total, top_p)[0]


def tempered(logits: Tensor, temperature: float, top_n_sigma: float) -> Tensor:
    """float32[V]: how far each logit lies from the greatest, divided by the temperature; -inf where top-n-sigma, if above 0,
    takes it. The greatest is finite."""
    scaled = (logits - logits.max()) / temperature  # the peak first: a tiny temperature must not overflow
    if top_n_sigma <= 0.0:
        return scaled
    sigma = logits[logits.isfinite()].double().std(correction=0).float()
    return scaled.masked_fill(scaled < -(sigma * top_n_sigma / temperature), -torch.inf)


def support(logits: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor | None:
    """Ascending ids that survive top-k, then top-p of what is left, then min-p relative to the likeliest. None: all.

    logits: float32[V], tempered. top_k below 1, top_p of 1 and min_p of 0 cut nothing.
    """
    ids: Tensor | None = None
    if 0 < top_k < len(logits):
        ids = largest(logits, top_k)
    if top_p < 1.0:
        ids = _nucleus_of_all(logits, top_p) if ids is None else _nucleus(logits, ids, _log_mass(logits[ids]), top_p)[0]
    if min_p > 0.0:
        ids = torch.arange(len(logits)) if ids is None else ids
        ids = ids[logits[ids] >= logits.max() + math.log(min_p)]
    return ids


def draw_token(logits: Tensor, ids: Tensor | None, uniform: float) -> int:
    """Inverse CDF over ids (None: all) in ascending order: the first id whose cumulated mass exceeds uniform * total."""
    kept = logits if ids is None else logits[ids]
    mass = (kept - kept.max()).exp_().cumsum(0, dtype=torch.float64)
    place = int(torch.searchsorted(mass, mass[-1] * uniform, right=True))
    if place >= len(mass):  # rounding at the far end: the last id that has any mass
        place = int(torch.searchsorted(mass, mass[-1]))
    return place if ids is None else int(ids[place])

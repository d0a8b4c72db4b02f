"""Creates random weights with codes. Lists the schemes that the kernels' tests combine with shapes."""

from __future__ import annotations

import torch

from rootstock_llm.kernels.contracts.coded_weight import CodedWeight, Scheme

HALVES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the numbers of the OCP format E2M1
SCHEMES = (
    Scheme(8),
    Scheme(8, 32),
    Scheme(8, 128, zero_points=True),
    Scheme(4, 32),
    Scheme(4, 64, zero_points=True),
    Scheme(4, 128),
    Scheme(4, 32, table=HALVES),
    Scheme(4, zero_points=True),
)


def coded(channels: int, depth: int, scheme: Scheme, seed: int = 0) -> CodedWeight:
    """Returns random codes, whose elements have about the size 1 / sqrt(depth).

    Args:
        seed: seed of the random values. If it is odd, bfloat16 represents the scales exactly.
    """
    generator = torch.Generator().manual_seed(seed)
    groups = scheme.groups_of(depth)
    codes = torch.randint(0, 1 << scheme.bits, (channels, depth), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(channels, groups, generator=generator) + 0.5) * (2 / depth**0.5 / (1 << scheme.bits))
    zeros = torch.randint(0, 1 << scheme.bits, (channels, groups), generator=generator, dtype=torch.uint8)
    return CodedWeight(codes, scales.bfloat16().float() if seed % 2 else scales, zeros if scheme.zero_points else None, scheme)

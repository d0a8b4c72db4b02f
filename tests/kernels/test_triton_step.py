"""Checks the kernels that prepare a step and their torch references: page tables, input tokens, page indices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import RaggedRows
from rootstock_llm.kernels.contracts.step_ops import DevicePageTableUpdates, StepKernels
from rootstock_llm.kernels.cpu.build import built_library
from rootstock_llm.kernels.cpu.library import CpuKernels
from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.kernels.triton.layers.layers import TritonLayers
from tests.all_pairs import each_pair

POISON = -7777


NAMES = ("triton", "torch") if torch.cuda.is_available() else ("triton", "torch", "cpp")


@pytest.fixture(params=NAMES)
def kernels(request: pytest.FixtureRequest, device: torch.device) -> StepKernels:
    made = {"triton": lambda: TritonLayers(device), "torch": lambda: reference, "cpp": lambda: CpuKernels(built_library(), 2)}
    kernels: StepKernels = made[request.param]()
    return kernels


def column(values: list[int], device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    """Returns a slice at an odd offset of a longer tensor, as the columns of a staged step are."""
    return torch.tensor([POISON, *values, POISON], dtype=dtype, device=device)[1:-1]


def updates_of(rows: list[tuple[int, int, list[int]]], device: torch.device) -> DevicePageTableUpdates:
    """Returns updates from (slot, first entry, pages)."""
    offsets = [sum(len(pages) for _, _, pages in rows[:index]) for index in range(len(rows))]
    columns = [slot for slot, _, _ in rows], [first for _, first, _ in rows], [len(pages) for _, _, pages in rows], offsets
    return DevicePageTableUpdates(
        *(column(values, device) for values in columns), column([p for _, _, ps in rows for p in ps], device)
    )


CASES: dict[str, list[tuple[int, int, list[int]]]] = {
    "nothing": [],
    "the first entry among others": [(2, 1, [8, 9]), (0, 0, [7, 6])],
    "the first entry left alone": [(0, 1, [7]), (-1, 0, [3])],
    "padding and empty": [(-1, 0, [3, 4]), (1, 2, []), (2, 0, [1])],
    "past the end": [(1, 298, [1, 2, 3, 4]), (2, 0, [9])],
    "before the start": [(1, -2, [1, 2, 3])],
    "outside alone": [(3, 300, [5, 6])],
    "long": [(3, 0, list(range(1000, 1300))), (0, 150, list(range(140)))],
}


# Cases for the reference only, which cannot skip an entry and writes the table's first entry instead. Each case has skipped
# entries, and checks that the first entry gets its new value or keeps its old one.
REFERENCE_CASES = ("the first entry among others", "the first entry left alone", "outside alone")
UPDATES = [(name, case) for name in NAMES for case in CASES if name == "torch" or case not in REFERENCE_CASES]


@pytest.mark.by_day(one_in=2, seed=12)
@pytest.mark.parametrize(("kernels", "case"), UPDATES, indirect=["kernels"])
def test_page_table_update_sets_only_entries_inside_the_table(kernels: StepKernels, device: torch.device, case: str) -> None:
    table = torch.full((4, 300), POISON, dtype=torch.int32, device=device)
    expected = table.tolist()
    for slot, first, pages in CASES[case]:
        for index, page in enumerate(pages):
            if slot >= 0 and 0 <= first + index < 300:
                expected[slot][first + index] = page
    kernels.update_page_table(table, updates_of(CASES[case], device))
    assert table.tolist() == expected


def ragged(
    rows: list[tuple[int, int, int]], table: Tensor, num_tokens: int, device: torch.device, reverse: bool = False
) -> RaggedRows:
    """Returns rows from (slot, start, tokens) with poisoned positions and locations.

    If `reverse`, the last row is first in the batch.
    """
    order = list(reversed(range(len(rows)))) if reverse else list(range(len(rows)))
    offsets, begin = [0] * len(rows), 0
    for row in order:
        offsets[row] = begin
        begin += rows[row][2]
    return RaggedRows(
        page_table=table,
        slots=column([slot for slot, _, _ in rows], device),
        starts=column([start for _, start, _ in rows], device),
        num_tokens=column([count for _, _, count in rows], device),
        offsets=column(offsets, device),
        positions=column([POISON] * num_tokens, device),
        locations=column([POISON] * num_tokens, device, torch.int64),
        max_context=max((start + count for _, start, count in rows), default=0),
    )


def expected_tokens(
    rows: list[tuple[int, int, int]],
    ragged_rows: RaggedRows,
    given: list[int],
    relay: list[int],
    num_extend: int,
    page_size: int,
    vocab_size: int,
) -> tuple[list[int], list[int], list[int], int]:
    """Returns (ids, positions, locations, number of unwritten ids), computed one token at a time."""
    tokens = len(ragged_rows.positions)
    ids, positions, locations, unwritten = [POISON] * tokens, [POISON] * tokens, [POISON] * tokens, 0
    table, offsets = ragged_rows.page_table.tolist(), ragged_rows.offsets.tolist()
    for row, (slot, start, count) in enumerate(rows):
        for index in range(count):
            token, position = offsets[row] + index, start + index
            logical = position // page_size
            page = table[slot][logical] if slot >= 0 and 0 <= logical < len(table[0]) else -1
            raw = given[token] if row < num_extend else relay[slot] if slot >= 0 else 0
            unwritten += row >= num_extend and raw < 0
            ids[token] = min(max(raw, 0), vocab_size - 1)
            positions[token] = position
            locations[token] = page * page_size + position % page_size if page >= 0 else -1
    return ids, positions, locations, unwritten


STEPS: dict[str, tuple[list[tuple[int, int, int]], int]] = {
    "one token": ([(0, 0, 1)], 1),
    "decodes, one unwritten": ([(0, 3, 1), (4, 11, 1), (2, 0, 1)], 0),
    "padding rows": ([(1, 5, 1), (-1, 0, 1), (-1, 0, 1)], 0),
    "mixed": ([(3, 0, 17), (1, 6, 3), (2, 12, 1), (4, 2, 1)], 2),
    "empty rows": ([(3, 0, 0), (1, 6, 3), (2, 12, 0), (0, 4, 1)], 2),
    "past the table": ([(1, 60, 9), (0, 64, 1), (2, 1000, 1)], 1),
    "several tokens of a decode row": ([(0, 0, 2), (4, 3, 3)], 1),
    "longer than a block": ([(2, 1, 40), (0, 5, 1)], 1),
    "no rows": ([], 0),
}


@pytest.mark.by_day(one_in=5, seed=14)
@each_pair(
    indirect=("kernels",),
    kernels=["triton", "torch"],
    page_size=[1, 4],
    case=STEPS,
    counted={"counted": True, "uncounted": False},
)
def test_token_resolution_fills_in_ids_and_positions_and_locations(
    kernels: StepKernels, device: torch.device, page_size: int, case: tuple[list[tuple[int, int, int]], int], counted: bool
) -> None:
    rows, num_extend = case
    tokens, vocab = sum(count for _, _, count in rows), 50
    width = 64 // page_size
    order = torch.randperm(5 * width, generator=torch.Generator().manual_seed(page_size)).view(5, width).int()
    order[3, width // 8 :] = -1
    ragged_rows = ragged(rows, order.to(device), tokens + 2, device, reverse=page_size == 4)
    own = [(13 * token) % 60 - 5 for token in range(tokens)]  # some ids are below 0, some beyond the vocabulary
    last = [7, 49, 5000, 3, -1]
    relay = torch.tensor(last, dtype=torch.int64, device=device)
    unwritten = column([3], device) if counted else None
    input_ids = column([POISON] * (tokens + 2), device, torch.int64)
    ids, positions, locations, missing = expected_tokens(rows, ragged_rows, own, last, num_extend, page_size, vocab)
    longest = max((count for _, _, count in rows), default=0)
    kernels.resolve_tokens(
        input_ids, ragged_rows, column(own, device), relay, unwritten, num_extend, page_size, vocab, max_tokens=longest
    )
    assert input_ids.tolist() == ids
    assert ragged_rows.positions.tolist() == positions
    assert ragged_rows.locations.tolist() == locations
    assert unwritten is None or unwritten.tolist() == [3 + missing]
    assert relay.tolist() == last


def test_token_resolution_accepts_an_empty_list_of_given_ids_when_all_rows_decode(
    kernels: StepKernels, device: torch.device
) -> None:
    table = torch.tensor([[3]], dtype=torch.int32, device=device)
    ragged_rows = ragged([(0, 2, 1)], table, 1, device)
    input_ids = torch.full((1,), POISON, device=device)
    given, relay = torch.empty(0, dtype=torch.int32, device=device), torch.tensor([4], device=device)
    kernels.resolve_tokens(input_ids, ragged_rows, given, relay, None, 0, 4, 50, max_tokens=1)
    assert (input_ids.tolist(), ragged_rows.positions.tolist(), ragged_rows.locations.tolist()) == ([4], [2], [14])


def test_token_resolution_prefers_known_ids_to_sampled_ids(kernels: StepKernels, device: torch.device) -> None:
    """Four of the six rows are tokens of slot 0; the row of their last position comes first. The last row is padding.

    Three of the four have a known id, and the fourth gets the relayed id. The row of slot 1 has no known and no relayed id.
    """
    table = torch.tensor([[5, 2], [7, 1]], dtype=torch.int32, device=device)
    ragged_rows = ragged([(0, 6, 1), (0, 3, 1), (1, 2, 1), (0, 4, 1), (0, 5, 1), (-1, 0, 1)], table, 6, device)
    input_ids, relay = torch.full((6,), POISON, device=device), torch.tensor([4, -1], device=device)
    nothing, unwritten = torch.empty(0, dtype=torch.int32, device=device), column([0], device)
    known = column([13, 70, -1, 0, -1, -1], device)
    kernels.resolve_tokens(input_ids, ragged_rows, nothing, relay, unwritten, 0, 4, 50, max_tokens=1, known=known)
    assert input_ids.tolist() == [13, 49, 0, 0, 4, 0] and unwritten.tolist() == [1]
    assert ragged_rows.positions.tolist() == [6, 3, 2, 4, 5, 0] and ragged_rows.locations.tolist() == [10, 23, 30, 8, 9, -1]


def test_token_resolution_fills_rows_that_are_longer_than_a_block(kernels: StepKernels, device: torch.device) -> None:
    """One program of the Triton kernel fills at most 512 tokens, so the row of 1,100 tokens needs three programs."""
    table = torch.randperm(100, generator=torch.Generator().manual_seed(1)).int().view(1, 100).to(device)
    rows = [(0, 3, 1100)]
    ragged_rows = ragged(rows, table, 1100, device)
    input_ids, given = torch.full((1100,), POISON, device=device), list(range(1100))
    kernels.resolve_tokens(input_ids, ragged_rows, column(given, device), input_ids[:1], None, 1, 16, 2000, max_tokens=1100)
    expected = expected_tokens(rows, ragged_rows, given, [0], 1, 16, 2000)
    assert (input_ids.tolist(), ragged_rows.positions.tolist(), ragged_rows.locations.tolist()) == expected[:3]


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("kernels", ["triton", "torch"], indirect=True)  # the C++ kernels use the reference
@pytest.mark.parametrize(
    ("slots", "counts", "width"),
    [([0], [1], 1), ([2, -1, 0], [3, 2, 0], 5), ([1, 0, 2], [0, 7, 4], 5), ([0, 2], [2600, 300], 2600), ([], [], 3)],
    ids=["one", "padding", "past the table", "long", "no rows"],
)
def test_page_indices_have_the_pages_of_all_rows(
    kernels: StepKernels, device: torch.device, slots: list[int], counts: list[int], width: int
) -> None:
    table = torch.randperm(3 * width, generator=torch.Generator().manual_seed(width)).view(3, width).int()
    table[:, 1::3] = -1
    begins = [2 + sum(counts[:row]) for row in range(len(counts) + 1)]  # the first two entries belong to no row
    expected = [POISON] * (begins[-1] + 2)
    for row, slot in enumerate(slots):
        for entry in range(counts[row]):
            page = int(table[slot, entry]) if slot >= 0 and entry < width else 0
            expected[begins[row] + entry] = max(page, 0)
    out = column([POISON] * len(expected), device)
    ragged_rows = ragged([(slot, 0, 1) for slot in slots], table.to(device), len(slots), device)
    kernels.page_indices(out, column(begins, device), ragged_rows)
    assert out.tolist() == expected


@pytest.mark.parametrize("kernels", [name for name in NAMES if name != "torch"], indirect=True)
def test_step_kernels_reject_columns_that_do_not_fit(kernels: StepKernels, device: torch.device) -> None:
    table = torch.zeros(1, 3, dtype=torch.int32, device=device)
    ragged_rows = ragged([(0, 0, 1)], table, 1, device)
    short = DevicePageTableUpdates(*(column([0] * count, device) for count in (2, 2, 1, 2)), column([1, 2], device))
    relay, ids = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.update_page_table(table, short)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.resolve_tokens(ids, ragged_rows, column([1, 2], device), relay, None, 1, 4, 50, 1)
    known, one = column([1, 2], device), torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.resolve_tokens(one, ragged_rows, column([1], device), relay, None, 0, 4, 50, 1, known)
    if isinstance(kernels, CpuKernels):
        return  # CpuKernels.page_indices is the reference
    with pytest.raises(ValueError, match="do not fit"):
        kernels.page_indices(ids.int(), column([0, 1, 2], device), ragged_rows)


def test_reference_step_kernels_do_not_read_values_on_the_host() -> None:
    """A tensor on the meta device has no values to read."""

    def blank(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows = RaggedRows(blank(4, 9), blank(3), blank(3), blank(3), blank(3), blank(7), blank(7, dtype=torch.int64), 9)
    reference.update_page_table(rows.page_table, DevicePageTableUpdates(blank(3), blank(3), blank(3), blank(3), blank(5)))
    ids, relay = blank(7, dtype=torch.int64), blank(4, dtype=torch.int64)
    reference.resolve_tokens(ids, rows, blank(5), relay, blank(1), num_extend=1, page_size=4, vocab_size=50, max_tokens=5)
    reference.resolve_tokens(ids, rows, blank(5), relay, blank(1), 0, 4, 50, max_tokens=1, known=blank(7))
    reference.page_indices(blank(11), blank(4), rows)
    with pytest.raises((RuntimeError, NotImplementedError)):
        int(relay[0])

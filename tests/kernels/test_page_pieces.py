"""Checks that copies of pages from host memory to a device's pools write the same bytes layer by layer as in whole pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rootstock_llm.kernels.triton import page_pieces
from rootstock_llm.services.worker.exec.pools.kv_pool import KVPool
from rootstock_llm.services.worker.exec.tiers import page_copier
from rootstock_llm.services.worker.exec.tiers.make_tiers import can_load_by_layers
from rootstock_llm.services.worker.exec.tiers.page_copier import PageCopier

PAGES = 7


class DeviceCopier(PageCopier):
    """A copier that treats host pools as a device's."""

    _on_host = property(lambda self: False)  # type: ignore[assignment]


def pools(device: torch.device) -> list[KVPool]:
    """Returns a model's pool with unequal layers, and a draft model's. The widest piece has several blocks and a remainder."""
    shapes = [[(2, 4, 16), (2, 4, 8)], [(1, 4, 64), (1, 4, 64)], [(8, 16, 264), (8, 16, 136)]], [[(1, 4, 8), (1, 4, 2)]]
    made = [[[torch.randn(PAGES, *shape, device=device) for shape in layer] for layer in each] for each in shapes]
    return [KVPool(tuple(keys for keys, _ in each), tuple(values for _, values in each)) for each in made]


def parts(made: list[KVPool]) -> list[Tensor]:
    return [each for pool in made for pair in zip(pool.keys, pool.values, strict=True) for each in pair]


def rows_of(count: int, size: int, device: torch.device) -> Tensor:
    rows = torch.randint(0, 256, (count, size), dtype=torch.uint8)
    return rows.pin_memory() if device.type == "cuda" else rows


@pytest.mark.parametrize("pages", [[3], [6, 0, 4, 1]], ids=len)
def test_group_loader_restores_layers_in_the_order_of_groups(device: torch.device, pages: list[int]) -> None:
    torch.manual_seed(1)
    made = pools(device)
    whole = [KVPool(tuple(k.clone() for k in pool.keys), tuple(v.clone() for v in pool.values)) for pool in made]
    copier = DeviceCopier(made, bring=page_pieces.bring_pieces)
    memory, ids = rows_of(len(pages) + 2, copier.page_bytes, device), np.array(pages, dtype=np.int32)
    at = np.arange(len(pages), dtype=np.int32)[::-1] + 1
    rows = [memory[row] for row in at.tolist()]
    before, wanted = [each.clone() for each in parts(made)], parts(whole)
    DeviceCopier(whole).restore(rows, ids)
    bring, come = copier.group_loader(memory, at, ids), set[int]()
    assert [len(layers) for layers in copier.groups.layers] == [1] * 4
    assert copier.groups.layers[0] == (3,), "the draft model's layers come first"
    for group, layers in enumerate(copier.groups.layers):
        bring(group)
        come |= set(layers)
        for number, part in enumerate(parts(made)):
            expected = wanted[number] if number // 2 in come else before[number]
            assert part.view(torch.uint8).equal(expected.view(torch.uint8)), f"part {number} after group {group}"


def test_restore_copies_whole_pages_in_pieces_of_staged_bytes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    made = pools(device)
    copier, ids = DeviceCopier(made), np.array([5, 2, 6], dtype=np.int32)
    rows = rows_of(3, copier.page_bytes, device)
    before = [each.clone() for each in parts(made)]
    copier.save(ids, rows.unbind())
    if device.type == "cuda":
        torch.cuda.synchronize()
    for each in parts(made):
        each[[5, 2, 6]] = 0
    monkeypatch.setattr(page_copier, "STAGED_BYTES", 2 * copier.page_bytes)
    copier.restore(rows.unbind(), ids)
    assert all(part.equal(old) for part, old in zip(parts(made), before, strict=True))
    with pytest.raises(IndexError):
        copier.restore(rows[:1].unbind(), np.array([PAGES], dtype=np.int32))


def test_copy_of_page_pieces_rejects_shapes_that_do_not_fit(device: torch.device) -> None:
    two, three = (torch.zeros(count, dtype=torch.int64, device=device) for count in (2, 3))
    with pytest.raises(ValueError, match="fit"):
        page_pieces.bring_pieces(two, three, torch.zeros((1, 3), dtype=torch.int64, device=device))


class TestStartupTrial:
    """At its start, the worker tries the layer-wise copy once with a page and then restores the page."""

    @pytest.mark.parametrize("how", ["rightly", "wrongly", "not at all"])
    def test_startup_trial_accepts_only_correct_copies(
        self, device: torch.device, how: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        made = pools(device)
        before = [each.clone() for each in parts(made)]

        def bring(rows: Tensor, pages: Tensor, pieces: Tensor) -> None:
            if how == "not at all":
                raise RuntimeError("no compiler")
            page_pieces.bring_pieces(rows, pages, pieces[: len(pieces) - (how == "wrongly")])

        copier = DeviceCopier(made, bring=bring)
        assert can_load_by_layers(copier, rows_of(2, copier.page_bytes, device)) == (how == "rightly")
        assert ("layer by layer" in caplog.text) == (how == "not at all")
        assert all(part.equal(old) for part, old in zip(parts(made), before, strict=True))

    def test_layer_groups_cannot_be_loaded_when_page_pieces_are_not_whole_words(self, device: torch.device) -> None:
        odd = KVPool((torch.zeros(2, 1, 1, 3, device=device),), (torch.zeros(2, 1, 1, 2, device=device),))
        copier = DeviceCopier([odd], bring=page_pieces.bring_pieces)
        assert not copier.can_load_groups and not can_load_by_layers(copier, rows_of(1, copier.page_bytes, device))
        assert not DeviceCopier([pools(device)[0]]).can_load_groups, (
            "a device whose kernels cannot read host memory does not copy layer by layer"
        )

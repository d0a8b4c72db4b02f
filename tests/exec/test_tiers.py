"""KV tiers with real KV: pages that are read from host memory or files are bitwise equal to the computed pages."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rootstock_llm.services.worker.control.flush import flush, parse
from rootstock_llm.services.worker.core.contracts.transfers import OperationKind, PageOperation, Tier
from rootstock_llm.services.worker.core.control import SchedulerControl
from rootstock_llm.services.worker.exec.contracts.operations import ReleaseMemory, ResumeMemory
from rootstock_llm.services.worker.exec.contracts.options import TierOptions
from rootstock_llm.services.worker.exec.tiers.page_copier import PageCopier
from rootstock_llm.services.worker.exec.tiers.redis_page_store import RedisPageStore
from tests.exec.draft_folders import write_eagle3
from tests.exec.late_copies import delay_copies, serve_and_compare
from tests.exec.remote_kv.served_reservations import until
from tests.exec.tier_prompts import POOL_PAGES, PROMPT_TOKENS, came_from, options, prompt
from tests.exec.tiered import DEADLINE_S, PAGE_SIZE, SECRET, Served, build
from tests.exec.tiny_models import TinyModel
from tests.night import NIGHTLY
from tests.services.redis_server import redis_server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    TinyModel("Qwen3", {"head_dim": 64, "num_attention_heads": 8, "hidden_size": 128}).build(made)
    return made


@pytest.fixture
def plain(folder: Path) -> Iterator[Served]:
    served = Served(*build(folder, 200, None))
    yield served
    served.close()


def test_answers_have_the_same_bits_with_pages_from_the_host_tier(folder: Path, plain: Served) -> None:
    served = Served(*build(folder, POOL_PAGES, options()))
    first = [served.ask(prompt(number), seed=number) for number in range(4)]
    again = [served.ask(prompt(number), seed=number) for number in range(4)]
    for number in range(4):
        assert first[number].bits == again[number].bits == plain.ask(prompt(number), seed=number).bits
        assert came_from(again[number], Tier.HOST)
    assert served.core.stats().failed_operations_total == 0
    served.close()


def test_answers_have_the_same_bits_with_pages_from_files_after_a_restart(folder: Path, plain: Served, tmp_path: Path) -> None:
    served = Served(*build(folder, POOL_PAGES, options(tmp_path / "pages")))
    first = [served.ask(prompt(number), seed=number) for number in range(4)]
    served.close()
    served = Served(*build(folder, POOL_PAGES, options(tmp_path / "pages")))
    for number in range(4):
        answer = served.ask(prompt(number), seed=number)
        assert answer.bits == first[number].bits
        assert came_from(answer, Tier.STORAGE)
    served.close()


@pytest.mark.parametrize("shared", [False, True], ids=["files", "redis"])
def test_prompt_of_a_deleted_salt_is_computed_again_after_a_restart(folder: Path, tmp_path: Path, shared: bool) -> None:
    """Pages of another salt stay in the storage. A request with the deleted salt that runs during the deletion completes."""
    with redis_server() as server:

        def in_redis(page_bytes: int, identity: bytes) -> RedisPageStore:
            return RedisPageStore(server.url, page_bytes, 60, identity)

        tiers = TierOptions(4.0, 0, in_redis, SECRET) if shared else options(tmp_path / "pages")
        served = Served(*build(folder, 2 * POOL_PAGES, tiers))
        first = {salt: served.ask(prompt(0), salt=salt) for salt in ("a", "b")}
        handle = served.submit(prompt(0), salt="a")
        served.turn()
        flushed = flush(SchedulerControl(served.core), served.executor, parse((), "a", None))
        assert flushed.stored is not None
        deleted = flushed.stored.result(DEADLINE_S)
        assert deleted.pages == PROMPT_TOKENS // PAGE_SIZE and not deleted.pending
        served.drain()
        assert served.answers[handle].bits == first["a"].bits
        served.close()
        served = Served(*build(folder, 2 * POOL_PAGES, tiers))
        until(lambda: served.turn() or served.core.stats().storage_pages == PROMPT_TOKENS // PAGE_SIZE)
        again = {salt: served.ask(prompt(0), salt=salt) for salt in ("a", "b")}
        assert {salt: answer.bits for salt, answer in again.items()} == {salt: answer.bits for salt, answer in first.items()}
        assert came_from(again["b"], Tier.STORAGE)
        assert again["a"].finish is not None and again["a"].finish.cached_tokens == 0
        served.close()


def test_answers_have_the_same_bits_with_pages_that_another_worker_stored(folder: Path, plain: Served) -> None:
    with redis_server() as server:

        def opened(page_bytes: int, identity: bytes) -> RedisPageStore:
            return RedisPageStore(server.url, page_bytes, 60, identity)

        first, second = (Served(*build(folder, POOL_PAGES, TierOptions(4.0, 0, opened, SECRET))) for _ in range(2))
        for number in range(4):
            first.ask(prompt(number), seed=number)
        until(lambda: second.turn() or second.core.stats().storage_pages >= 3 * (PROMPT_TOKENS // PAGE_SIZE))
        for number in range(3):
            answer = second.ask(prompt(number), seed=number)
            assert answer.bits == plain.ask(prompt(number), seed=number).bits
            assert came_from(answer, Tier.STORAGE)
        first.close()
        second.close()


def slowly(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None]) -> None:
    """Delays layer-wise loads.

    Args:
        monkeypatch: replaces a method of PageCopier.
        before: function that is called before each group of layers is copied, with the number of the group.
    """
    group_loader = PageCopier.group_loader

    def slow(self: PageCopier, memory: Any, rows: Any, pages: Any) -> Callable[[int], None]:
        bring = group_loader(self, memory, rows, pages)

        def later(group: int) -> None:
            before(group)
            bring(group)

        return later

    monkeypatch.setattr(PageCopier, "group_loader", slow)


@pytest.mark.parametrize("drafts", ["", "ngram", "eagle3"])
def test_step_runs_while_later_layers_are_loaded(
    folder: Path, plain: Served, tmp_path: Path, drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each group after the first is loaded only when a step waits for a layer. A step that waits for all layers would hang."""
    more: dict[str, Any] = {"max_drafts": 2, "speculative_algorithm": drafts} if drafts else {}
    if drafts == "eagle3":
        write_eagle3(tmp_path / "head", folder, 90)
        more["draft_model"] = str(tmp_path / "head")
    served = Served(*build(folder, 40, options(), **more))  # 40 pages suffice for the cached pages and all loads together
    for number in range(4):
        served.ask(prompt(number), seed=number)
    mover, arrivals = served.executor._mover, served.executor.runner._arrivals
    assert mover is not None
    asked: threading.Semaphore

    def before(group: int) -> None:
        assert not group or asked.acquire(timeout=DEADLINE_S), f"no step has waited for a layer within {DEADLINE_S:.0f} s"

    def wait(layer: int, ask: Callable[[int], None] = arrivals.wait) -> None:
        if arrivals._awaited:
            asked.release()
        ask(layer)

    slowly(monkeypatch, before)
    monkeypatch.setattr(arrivals, "wait", wait)
    mover._loads._bytes_s = 1e18
    for number in range(4):
        asked = threading.Semaphore(0)
        answer = served.ask(prompt(number), seed=number)
        assert answer.bits == plain.ask(prompt(number), seed=number).bits
        assert came_from(answer, Tier.HOST)
    assert served.core.stats().failed_operations_total == 0
    served.close()


class TestDuringALoad:
    """Tests during a load that was reported to the core as complete before its last bytes have arrived."""

    @pytest.fixture
    def may_continue(self) -> threading.Event:
        return threading.Event()

    @pytest.fixture
    def slowly_loading(self, folder: Path, may_continue: threading.Event, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
        served = Served(*build(folder, POOL_PAGES, options()))
        mover = served.executor._mover
        assert mover is not None
        mover._loads._bytes_s = 1e18
        slowly(monkeypatch, lambda _: _wait_for_event(may_continue))
        page = np.zeros(1, dtype=np.int32)
        served.executor.transfer([PageOperation(99, OperationKind.LOAD, (b"key",), page, page)])
        until(lambda: [fact for fact in served.executor.facts() if fact.early] != [])
        yield served
        may_continue.set()
        served.close()

    def test_release_of_memory_waits_for_the_load(self, slowly_loading: Served, may_continue: threading.Event) -> None:
        release = threading.Thread(target=slowly_loading.executor.apply, args=(ReleaseMemory(weights=False, kv=True),))
        release.start()
        time.sleep(0.05)
        assert release.is_alive()
        may_continue.set()
        release.join(DEADLINE_S)
        assert not release.is_alive() and not slowly_loading.executor.runner.passes.pool.keys
        slowly_loading.executor.apply(ResumeMemory(weights=False, kv=True))

    def test_lost_device_is_reported_once(self, slowly_loading: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        lost: list[str] = []
        slowly_loading.executor.on_lost = lost.append
        mover = slowly_loading.executor._mover
        assert mover is not None
        for _ in range(2):
            mover.on_lost("pages did not come")
        assert lost == ["pages did not come"]


def _wait_for_event(may_continue: threading.Event) -> None:
    assert may_continue.wait(DEADLINE_S), f"the test did not release the load within {DEADLINE_S:.0f} s"


SCHEDULES = 60 if NIGHTLY else 4


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_requests_read_no_poisoned_page_when_copies_take_many_steps(
    folder: Path, plain: Served, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with shared prefixes arrive and are aborted at random times, while copies take many steps."""
    rng = random.Random(seed)
    served = Served(*build(folder, POOL_PAGES, options(tmp_path / "pages")), poisoned=True)
    delay_copies(served, rng, monkeypatch)
    # Loads are reported at their ends (even seeds) or immediately (odd seeds).
    served.executor._mover._loads._bytes_s = seed % 2 * 1e18  # type: ignore[union-attr]
    slowly(monkeypatch, lambda _: time.sleep(rng.choice((0.0, 0.0, 0.002, 0.02))))
    serve_and_compare(served, plain, rng, 0.1, temperature=1.0, frequency_penalty=0.3)
    memory, stats = served.core.memory, served.core.stats()
    assert memory.num_leased == 0 and not memory.quarantined and memory.tree.num_evictable == memory.tree.num_pages
    assert stats.backed_up_pages_total > 0 and stats.failed_operations_total == 0
    served.close()

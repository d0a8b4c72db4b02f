"""Tests of single decisions of the routing policies, with their reasons."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from rootstock_llm.services.gateway.routing.config import RoutingConfig, RoutingPolicy
from rootstock_llm.services.gateway.routing.policies import (
    REASONS,
    TRIED_SAVES,
    Pick,
    RoutingQuery,
    WorkerColumns,
    has_free_slot,
    hits_of,
    make_policy,
    rows_with_free_slots,
    speculate,
    usable_reach,
)
from rootstock_llm.services.gateway.routing.prefix_index import PrefixIndex
from tests.all_pairs import each_value


def fleet(requests: Sequence[int], running: int | Sequence[int] = 100, limit: int = 1000) -> WorkerColumns:
    """Returns columns with one usable worker per entry of `requests`."""
    workers = WorkerColumns()
    sizes = [running] * len(requests) if isinstance(running, int) else running
    for number, (count, size) in enumerate(zip(requests, sizes, strict=True)):
        row = workers.add(f"w{number}", random.Random(number).getrandbits(64))
        workers.usable[row], workers.limit[row], workers.running[row], workers.requests[row] = True, limit, size, count
    return workers


def query(
    workers: WorkerColumns, matched: Sequence[int] | None = None, prompt: int = 1000, key: str = "", lora: str = ""
) -> RoutingQuery:
    if matched is None:
        return RoutingQuery(prompt, None, key, lora)
    padded = np.zeros(workers.capacity, np.int64)
    padded[: len(matched)] = matched
    return RoutingQuery(prompt, padded, key, lora)


def pick(policy: str, workers: WorkerColumns, request: RoutingQuery, config: RoutingConfig | None = None) -> Pick:
    chosen = make_policy(policy, config or RoutingConfig(), random.Random(5)).pick(request, workers)
    assert chosen is not None and chosen.reason in REASONS
    return chosen


def set_last(workers: WorkerColumns, last: Sequence[int]) -> WorkerColumns:
    workers.last_pick[: len(last)] = last
    return workers


@pytest.mark.parametrize(
    ("requests", "running", "last", "row"),
    [
        ([5, 3, 4], [100, 100, 100], [0, 0, 0], 1),
        ([40, 10, 30], [100, 10, 100], [0, 0, 0], 2),
        ([20, 10, 2], [100, 50, 10], [0, 0, 0], 2),
        ([3, 3, 3], [100, 100, 100], [7, 5, 6], 1),
        ([3, 3, 9], [0, 0, 0], [2, 1, 0], 1),
    ],
    ids=["fewest", "relative to size", "equal load: fewest requests", "all equal: oldest pick", "unknown size"],
)
def test_policy_least_requests_picks_the_worker_with_the_lowest_load_relative_to_size(
    requests: list[int], running: list[int], last: list[int], row: int
) -> None:
    workers = set_last(fleet(requests, running), last)
    assert pick("least_requests", workers, query(workers)) == Pick(row, "least_requests", 0)


def test_policy_least_tokens_compares_tokens_relative_to_the_size_of_workers() -> None:
    workers = fleet([1, 9, 9], [100, 50, 100])
    workers.tokens[:3] = [5000, 1500, 2000]
    assert pick("least_tokens", workers, query(workers)).row == 2


def test_policy_round_robin_picks_the_worker_with_the_oldest_pick() -> None:
    workers = set_last(fleet([9, 0, 0]), [1, 3, 2])
    assert pick("round_robin", workers, query(workers)) == Pick(0, "round_robin", 0)


def test_policy_random_picks_every_worker_and_repeats_the_picks_for_one_seed() -> None:
    workers = fleet([0] * 5)
    runs = []
    for _ in range(2):
        policy = make_policy("random", RoutingConfig(), random.Random(1))
        runs.append([chosen.row for _ in range(200) if (chosen := policy.pick(query(workers), workers))])
    assert runs[0] == runs[1] and min(Counter(runs[0])[row] for row in range(5)) > 20


def test_power_of_two_picks_the_less_loaded_of_two() -> None:
    workers = fleet([0, 1, 2, 3])
    policy = make_policy("power_of_two", RoutingConfig(), random.Random(1))
    rows = Counter(chosen.row for _ in range(600) if (chosen := policy.pick(query(workers), workers)))
    assert rows[3] == 0 and rows[0] > rows[1] > rows[2] > 0
    assert pick("power_of_two", fleet([4]), RoutingQuery(10)).row == 0


@pytest.mark.by_day(one_in=3, seed=39)
@pytest.mark.parametrize("policy", list(RoutingPolicy))
def test_policy_picks_only_usable_allowed_workers_with_free_slots(policy: str) -> None:
    workers = fleet([0, 0, 0, 7, 5, 0])
    workers.usable[0] = False
    workers.limit[1] = 0
    workers.drop(2)
    allowed = np.ones(workers.capacity, np.bool_)
    allowed[3] = False
    workers.limit[4] = 6
    matched = np.full(workers.capacity, 900)
    for key in ("", "a", "b", "c"):
        request = RoutingQuery(1000, matched, key, allowed=allowed)
        assert rows_with_free_slots(request, workers).tolist() == [4, 5]
        assert pick(policy, workers, request).row in (4, 5)
    workers.requests[4], workers.limit[5] = 6, 0
    assert not has_free_slot(request, workers)
    assert make_policy(policy, RoutingConfig(), random.Random(1)).pick(request, workers) is None


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("policy", [RoutingPolicy.RANDOM, RoutingPolicy.PREFIX_AWARE])
def test_policy_picks_no_worker_when_there_are_no_workers(policy: str) -> None:
    assert (
        make_policy(policy, RoutingConfig(), random.Random(1)).pick(RoutingQuery(10, key="k", lora="x"), WorkerColumns()) is None
    )


def test_unknown_policy_name_is_refused() -> None:
    with pytest.raises(ValueError):
        make_policy("fastest", RoutingConfig(), random.Random(1))


@pytest.mark.by_day(one_in=4, seed=15)
@each_value(
    policy=list(RoutingPolicy),
    case={
        "some workers": ([0, 9, 9], [1, 2], {1, 2}),
        "no worker": ([0, 9, 9], [], {0, 1, 2}),
        "worker above the load gate": ([0, 90, 9], [1], {0, 1, 2} - {1}),
    },
)
def test_policy_prefers_workers_with_the_adapter(policy: str, case: tuple[list[int], list[int], set[int]]) -> None:
    requests, loras, rows = case
    workers = fleet(requests)
    for row in loras:
        workers.loras[row] = frozenset({"x", "y"})
    for key in ("", "a", "b", "c", "d"):
        assert pick(policy, workers, query(workers, key=key, lora="x")).row in rows


def test_policy_picks_another_worker_when_the_worker_with_the_adapter_is_full() -> None:
    workers = fleet([0, 9, 9])
    workers.loras[1], workers.limit[1] = frozenset({"x"}), 9
    assert pick("least_requests", workers, query(workers, lora="x")).row == 0


def by_key(workers: WorkerColumns, policy: str = "affinity", count: int = 300) -> dict[str, Pick]:
    return {f"user-{n}": pick(policy, workers, query(workers, key=f"user-{n}")) for n in range(count)}


@pytest.mark.parametrize("policy", ["affinity", "prefix_aware"])
def test_routing_keys_keep_the_worker_when_another_worker_is_removed(policy: str) -> None:
    workers = fleet([3] * 5)
    before = by_key(workers, policy)
    assert {chosen.reason for chosen in before.values()} == {"affinity"}
    assert min(Counter(chosen.row for chosen in before.values()).values()) > 30
    workers.usable[2] = False
    without = by_key(workers, policy)
    moved = {key for key in before if before[key].row != without[key].row}
    assert moved == {key for key in before if before[key].row == 2}


def test_policy_affinity_uses_least_requests_without_a_routing_key() -> None:
    assert pick("affinity", fleet([5, 1, 4]), RoutingQuery(10)) == Pick(1, "least_requests", 0)


def test_policy_affinity_picks_the_next_worker_of_the_routing_key_when_the_first_is_busy() -> None:
    workers = fleet([10] * 5)
    first = {key: chosen.row for key, chosen in by_key(workers).items()}
    workers.requests[3] = 10 + 65
    after = by_key(workers)
    for key, chosen in after.items():
        assert chosen.reason == ("affinity_overflow" if first[key] == 3 else "affinity")
        assert chosen.row != 3 and (first[key] == 3 or chosen.row == first[key])
    assert len({chosen.row for key, chosen in after.items() if first[key] == 3}) == 4


def test_policy_affinity_picks_another_worker_when_the_worker_of_the_routing_key_is_full() -> None:
    workers = fleet([10] * 3)
    first = {key: chosen.row for key, chosen in by_key(workers).items()}
    workers.limit[1] = 10
    assert {chosen.reason for key, chosen in by_key(workers).items() if first[key] == 1} == {"affinity_overflow"}


@pytest.mark.parametrize(
    ("requests", "matched", "row", "reason"),
    [
        ([10, 10, 10], [0, 512, 0], 1, "prefix"),
        ([10, 10, 10], [512, 576, 0], 1, "prefix"),
        ([9, 10, 10], [0, 960, 0], 1, "prefix"),
        ([10, 13, 10], [0, 960, 0], 1, "prefix"),
        ([10, 17, 10], [0, 960, 0], 0, "prefix_overflow"),
        ([10, 17, 10], [0, 960, 256], 2, "prefix"),
        ([0, 1, 0], [0, 960, 0], 1, "prefix"),
        ([12, 11, 10], [0, 0, 0], 2, "no_match"),
        ([12, 11, 10], [63, 0, 0], 2, "no_match"),
        ([12, 11, 10], [128, 128, 128], 2, "prefix"),
        ([100, 20, 70], [960, 0, 0], 1, "load_gate"),
        ([0, 100, 60], [0, 0, 960], 0, "load_gate"),
    ],
    ids=[
        "one match", "longer match", "match on a busier worker", "load at the bound", "load above the bound", "shorter match",
        "one request, others idle", "no match", "match below the minimum", "equal matches: least load", "load gate",
        "load gate without the match",
    ],
)  # fmt: skip
def test_policy_prefix_aware_weighs_prefix_matches_against_the_load(
    requests: list[int], matched: list[int], row: int, reason: str
) -> None:
    workers = fleet(requests)
    assert pick("prefix_aware", workers, query(workers, matched)) == Pick(row, reason, matched[row])


TIER_CASES: dict[str, tuple[list[int], list[tuple[int, int, int]], list[tuple[float, float]], int, int]] = {
    "device before host": ([10, 10], [(8, 0, 0), (0, 8, 0)], [(0.8, 0.5)] * 2, 0, 512),
    "more host blocks before fewer device blocks": ([10, 10], [(4, 0, 0), (0, 8, 0)], [(0.8, 0.5)] * 2, 1, 512),
    "host before storage": ([10, 10], [(0, 0, 8), (0, 8, 0)], [(0.8, 0.5)] * 2, 1, 512),
    "lower tiers after device blocks": ([10, 10], [(8, 0, 0), (8, 2, 2)], [(0.8, 0.5)] * 2, 1, 768),
    "tier without a saving": ([10, 12], [(0, 0, 0), (0, 0, 15)], [(0.8, 0.0)] * 2, 0, 0),
    "storage blocks after a tier without a saving": ([10, 12], [(0, 0, 0), (0, 1, 14)], [(0.0, 0.9)] * 2, 0, 0),
    "faster storage": ([10, 10], [(0, 0, 8), (0, 0, 8)], [(0.8, 0.2), (0.8, 0.7)], 1, 512),
    "small saving, less loaded worker": ([10, 13], [(0, 0, 0), (0, 0, 15)], [(0.8, 0.1)] * 2, 0, 0),
}


def test_policy_prefix_aware_weights_cache_hits_by_the_saving_of_the_cache_tier() -> None:
    """A case has the requests, the blocks on device, host and storage, and the savings of each worker.

    Its last values are the expected worker and the predicted tokens.
    """
    for name, (requests, blocks, saves, row, predicted) in TIER_CASES.items():
        workers = fleet(requests)
        workers.owner[: len(requests)] = range(len(requests))
        workers.host_saves[: len(requests)], workers.storage_saves[: len(requests)] = zip(*saves, strict=True)
        hits = hits_of(np.cumsum(np.array(blocks), axis=1).T, workers)
        chosen = pick("prefix_aware", workers, RoutingQuery(1000, hits.matched, saved=hits.saved))
        assert (chosen.row, chosen.predicted_tokens) == (row, predicted), name


def test_cache_hits_count_with_a_small_saving_when_a_tier_without_a_saving_is_tried() -> None:
    workers = fleet([10, 10])
    workers.owner[:2] = range(2)
    workers.host_saves[:2], workers.storage_saves[:2] = (0.0, 0.9), (0.0, 0.0)
    reach = np.cumsum(np.array([(1, 2, 4), (1, 2, 4)]), axis=1).T
    kept, tried = hits_of(reach, workers), hits_of(reach, workers, tries=True)
    assert kept.saved is not None and tried.saved is not None
    assert (kept.matched[:2] // 64).tolist() == [1, 3] and (tried.matched[:2] // 64).tolist() == [7, 7]
    assert tried.saved[:2] / 64 == pytest.approx([1 + 6 * TRIED_SAVES, 1 + 2 * 0.9 + 4 * TRIED_SAVES])


def test_cache_hits_are_device_matches_when_the_index_has_no_lower_tiers() -> None:
    workers = fleet([10, 10, 10])
    workers.owner[:3] = [1, 7, -1]
    hits = hits_of(np.array([[3, 5]]), workers)
    assert hits.saved is None and hits.matched[:3].tolist() == [5 * 64, 0, 0], "owners that the index does not have get no match"
    assert not hits_of(np.zeros((1, 0), np.int64), workers).matched.any()


@pytest.mark.parametrize(
    ("cached", "num_tokens", "ends"),
    [(0, 300, 4), (0, 257, 4), (0, 256, 3), (0, 63, 0), (128, 300, 4), (256, 999, 4), (0, 999, 0)],
    ids=[
        "whole page before the end",
        "one more token",
        "hit without the last token",
        "no block",
        "branch",
        "begun",
        "begun, new",
    ],
)
def test_routed_prompt_counts_up_to_the_ends_that_its_worker_will_mark(cached: int, num_tokens: int, ends: int) -> None:
    """A prefix hit at a worker with windowed layers can end only after blocks that the worker marks.

    The worker already has the first `cached` tokens of a prompt. The gateway then routes this prompt to it and predicts the marks
    that the worker will set. If the same prompt comes again, its predicted hit is `ends` blocks. If another prompt shares only
    the first `cached` tokens, its predicted hit is these tokens.

    Args:
        num_tokens: Number of tokens of the prompt and of the output so far.
    """
    workers, index = fleet([0, 0]), PrefixIndex()
    workers.owner[:2] = [index.owner("marks", 0), index.owner("plain", 0)]
    workers.end_pages[0] = 16
    blocks = [bytes([at]) * 8 for at in range(min(num_tokens, 300) // 64)]
    index.stored(0, blocks[: cached // 64])
    for row in (0, 1):
        speculate(index, workers, row, blocks, num_tokens, 10.0)
    found = usable_reach(index.reach(blocks), index, workers, blocks)
    assert found[0].tolist() == [ends, len(blocks)]
    branching = [*blocks[: cached // 64], b"another!"]
    assert usable_reach(index.reach(branching), index, workers, branching)[0, 0] == cached // 64
    index.expire(11.0)
    assert usable_reach(index.reach(blocks), index, workers, blocks)[0].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("requests", "trips"),
    [([64, 0], False), ([65, 0], True), ([200, 134], False), ([195, 130], False), ([196, 130], True)],
    ids=["64 more", "65 more", "66 more, below 1.5 times", "65 more, 1.5 times", "66 more, above 1.5 times"],
)
def test_load_gate_has_the_thresholds_of_sglang(requests: list[int], trips: bool) -> None:
    workers = fleet(requests)
    assert (pick("prefix_aware", workers, query(workers)).reason == "load_gate") is trips


def test_load_gate_compares_loads_relative_to_the_size_of_workers() -> None:
    workers = fleet([160, 20], [400, 50])
    assert pick("prefix_aware", workers, query(workers)).reason == "no_match"


def test_policy_prefix_aware_prefers_a_prefix_match_to_the_routing_key() -> None:
    workers = fleet([10] * 4)
    home = pick("prefix_aware", workers, query(workers, key="u")).row
    other = (home + 1) % 4
    matched = [0] * 4
    matched[other] = 640
    assert pick("prefix_aware", workers, query(workers, matched, key="u")) == Pick(other, "prefix", 640)


def test_policy_prefix_aware_avoids_the_busy_worker_of_a_routing_key_below_the_load_gate() -> None:
    workers = fleet([10] * 4)
    home = pick("prefix_aware", workers, query(workers, key="u")).row
    workers.requests[home] = 17
    chosen = pick("prefix_aware", workers, query(workers, key="u"))
    assert chosen.row != home and chosen.reason == "affinity_overflow"


def test_policy_prefix_aware_sends_a_new_prefix_to_the_same_worker_at_all_gateways() -> None:
    """The last picks of the gateways differ."""
    for number in range(20):
        request = RoutingQuery(1000, first_block=number.to_bytes(8, "big"))
        one = pick("prefix_aware", set_last(fleet([5, 5, 6, 5]), [9, 1, 4, 3]), request)
        other = pick("prefix_aware", set_last(fleet([5, 6, 5, 5]), [2, 8, 1, 5]), request)
        assert one == other and one.reason == "no_match"


def test_policy_prefix_aware_sends_a_new_prefix_to_a_worker_with_low_load() -> None:
    workers = fleet([100, 104, 107, 130])
    rows = Counter(pick("prefix_aware", workers, RoutingQuery(1000, first_block=bytes([number]))).row for number in range(200))
    assert set(rows) == {0, 1} or set(rows) == {0, 1, 2}
    assert all(count > 40 for count in rows.values())
    sizes = fleet([5, 50], running=[10, 100])
    assert {pick("prefix_aware", sizes, RoutingQuery(1000, first_block=bytes([number]))).row for number in range(50)} == {0, 1}

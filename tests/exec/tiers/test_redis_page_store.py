"""The shared storage tier in a real Redis: news between workers, a full, emptied, lost or replaced server, and quotas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rootstock_llm.services.worker.core.contracts.transfers import Deleted, Selection
from rootstock_llm.services.worker.core.tiers.page_keys import TAG_BYTES, UNSALTED
from rootstock_llm.services.worker.exec.contracts.page_store import News, Written
from rootstock_llm.services.worker.exec.tiers import redis_page_store
from rootstock_llm.services.worker.exec.tiers.known_keys import KnownKeys
from rootstock_llm.services.worker.exec.tiers.redis_page_store import RedisPageStore
from tests.exec.tiers.pages import PAGE, A, B, Hours, keys, read, write
from tests.night import NIGHTLY
from tests.services.redis_server import EITHER_SERVER, RedisServer

IDENTITY = bytes(range(32))
NOTHING = News((), ())


@pytest.fixture(scope="module", params=EITHER_SERVER if NIGHTLY else EITHER_SERVER[:1])
def one_server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    server = RedisServer(request.param)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def server(one_server: RedisServer) -> RedisServer:
    one_server.client.flushall()
    one_server.client.config_set("maxmemory", 0)
    return one_server


def store(server: RedisServer, clock: Hours | None = None, identity: bytes = IDENTITY) -> RedisPageStore:
    """Returns a store that has scanned the server."""
    made = RedisPageStore(server.url, PAGE, 60, identity, clock or Hours())
    made.news()
    return made


def test_workers_with_equal_identities_read_each_others_pages(server: RedisServer) -> None:
    first, second, foreign = store(server), store(server), store(server, identity=bytes(32))
    assert write(first, keys(1, 2, 3)) == Written(tuple(keys(1, 2, 3)), ())
    assert read(second, keys(1)) == 0, "the second worker has not received the news yet"
    assert second.news() == News(tuple(keys(1, 2, 3)), ()) and foreign.news() == NOTHING
    assert read(second, keys(1, 2, 4, 3)) == 2 and read(first, keys(3, 1)) == 2
    assert first.news() == NOTHING, "a worker gets no news of its own pages"
    assert write(second, keys(3, 4)) == Written(tuple(keys(4)), (), already_stored=1)
    assert first.news() == News(tuple(keys(4)), ()) and second.news() == NOTHING


def test_worker_scans_all_keys_at_the_start_and_after_missed_messages(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_page_store, "SCANNED", 3)
    first, second = store(server), store(server)
    many = keys(*range(20))
    write(first, many)
    assert set(store(server).keys()) == set(many)
    server.client.xtrim(first._news_key, maxlen=0)
    write(first, keys(99))
    news = second.news()
    assert set(news.stored) == {*many, *keys(99)} and read(second, [*many, *keys(99)]) == 21


def test_stored_pages_have_a_fixed_size_and_an_expiry_time(server: RedisServer) -> None:
    write(store(server), keys(1, 2))
    pages = [name for name in server.client.scan_iter() if b":p:" in name]
    assert len(pages) == 2 and all(0 < server.client.pttl(name) <= 60_000 for name in pages)
    assert all(len(server.client.get(name)) == PAGE + redis_page_store.HEAD_BYTES for name in pages)


def test_store_ignores_keys_of_another_version(server: RedisServer) -> None:
    """Version 1 had page keys of 32 bytes. A store that read version 1's news as keys of 40 bytes would get wrong page keys."""
    older = f"pages:{IDENTITY[:16].hex()}:"
    server.client.set(f"{older}p:".encode() + bytes(32), bytes(PAGE), px=60_000)
    server.client.xadd(f"{older}news", {"h": ""})
    it = store(server)
    server.client.xadd(f"{older}news", {"k": bytes(range(160))})
    assert it.news() == NOTHING and write(it, keys(1)).stored == tuple(keys(1))
    assert it.delete() == Deleted(1, tuple(keys(1))) and not it.keys()
    assert server.client.xlen(f"{older}news") == 2 and server.client.pttl(f"{older}p:".encode() + bytes(32)) > 0


def test_reading_a_page_extends_the_expiry_time(server: RedisServer) -> None:
    it = store(server)
    write(it, keys(1, 2))
    for name in server.client.keys("pages:*:p:*"):
        server.client.pexpire(name, 20_000)
    assert read(it, keys(1)) == 1
    left = sorted(server.client.pttl(name) for name in server.client.keys("pages:*:p:*"))
    assert left[0] <= 20_000 and left[1] > 50_000


@pytest.mark.by_day(one_in=2, seed=6)
@pytest.mark.parametrize("value", [b"", b"x" * (PAGE + 23), b"x" * (PAGE + 24), b"x" * (PAGE + 25)])
def test_read_loses_a_damaged_page(server: RedisServer, value: bytes) -> None:
    it = store(server)
    write(it, keys(1, 2, 3))
    (name,) = [name for name in server.client.scan_iter() if name.endswith(keys(2)[0])]
    server.client.set(name, value)
    assert read(it, keys(1, 2, 3)) == 1
    assert it.take_lost() == tuple(keys(2)) and it.take_lost() == ()
    assert read(it, keys(3, 2)) == 1 and it.counts().corrupt_pages == 1
    assert write(it, keys(2)).stored == tuple(keys(2)), "a lost page can be written again"
    assert read(it, keys(1, 2, 3)) == 3


def test_page_that_is_stored_under_another_key_is_not_returned(server: RedisServer) -> None:
    it = store(server)
    write(it, keys(1, 2))
    one, two = [next(name for name in server.client.scan_iter() if name.endswith(key)) for key in keys(1, 2)]
    server.client.set(one, server.client.get(two))
    assert read(it, keys(1)) == 0


def test_expired_page_does_not_count_as_a_fault(server: RedisServer) -> None:
    it = store(server)
    write(it, keys(1, 2))
    server.client.delete(next(name for name in server.client.scan_iter() if name.endswith(keys(1)[0])))
    assert read(it, keys(1, 2)) == 0 and it.take_lost() == tuple(keys(1))
    assert it.counts().corrupt_pages == it.counts().failed_reads == 0


def test_read_loses_all_later_missing_pages_when_a_page_is_missing(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_page_store, "GROUP_BYTES", 2 * PAGE)
    monkeypatch.setattr(redis_page_store, "DELETED", 3)
    it, many = store(server), keys(*range(12))
    write(it, many)
    gone = {many[at] for at in (1, 2, 5, 6, 8, 11)}
    for name in list(server.client.scan_iter()):
        if any(name.endswith(key) for key in gone):
            server.client.delete(name)
    assert read(it, many) == 1 and set(it.take_lost()) == gone
    assert set(write(it, many).stored) == gone, "the missing pages can be written again at once"
    assert read(it, many) == 12


def test_deletion_removes_pages_for_all_workers(server: RedisServer) -> None:
    first, second = store(server), store(server)
    write(first, keys(1, 2))
    second.news()
    first.delete()
    write(first, keys(3))
    assert not [name for name in server.client.keys("pages:*:p:*") if not name.endswith(keys(3)[0])]
    news = second.news()
    assert news.stored == tuple(keys(3)) and set(news.dropped) == set(keys(1, 2))
    assert first.news().stored == () and read(first, keys(3)) == 1
    server.client.flushall()
    assert second.news() == News((), tuple(keys(3)))


def test_full_server_can_be_read_and_is_written_again_after_a_pause(server: RedisServer) -> None:
    clock = Hours()
    it = store(server, clock)
    write(it, keys(1))
    server.client.config_set("maxmemory", 1)  # the server is full and does not evict
    assert write(it, keys(2, 3)).stored == () and it.counts().failed_writes == 1
    assert read(it, keys(1)) == 1
    server.client.config_set("maxmemory", 0)
    assert write(it, keys(2)).stored == (), "the store writes nothing during the pause"
    clock.pass_by()
    assert write(it, keys(2)).stored == tuple(keys(2))


def test_worker_pauses_and_scans_again_when_the_server_was_lost(server: RedisServer) -> None:
    clock = Hours()
    it, other = store(server, clock), store(server)
    write(it, keys(1))
    server.kill()
    assert read(it, keys(1)) == 0 and write(it, keys(2)).stored == () and it.news() == NOTHING
    assert it.counts().failed_reads == 1 and it.counts().failed_writes == 0
    server.start()
    assert it.news() == NOTHING, "the store does not connect during the pause"
    other.news()
    assert write(RedisPageStore(server.url, PAGE, 60, IDENTITY), keys(5)).stored == tuple(keys(5))
    clock.pass_by()
    assert it.news() == News(tuple(keys(5)), ())
    assert read(it, keys(5)) == 1


def test_worker_reconnects_when_the_server_becomes_a_replica(server: RedisServer) -> None:
    """After a refused write or read, the worker connects again, because the address may lead to another server."""

    def connections() -> set[str]:
        return {found["id"] for found in server.client.client_list()} - {str(server.client.client_id())}

    clock, others = Hours(), connections()
    it = store(server, clock)
    write(it, keys(1))
    for number, call in ((2, lambda: bool(write(it, keys(2)).stored)), (3, lambda: bool(read(it, keys(1))))):
        before = connections() - others
        server.client.execute_command("REPLICAOF", "127.0.0.1", "1")
        try:
            assert before and not call() and not before & connections()
        finally:
            server.client.execute_command("REPLICAOF", "NO", "ONE")
        clock.pass_by()
        it.news()
        assert write(it, keys(number)).stored == tuple(keys(number)) and read(it, keys(1, number)) == 2
        assert not before & connections()
    assert (it.counts().failed_writes, it.counts().failed_reads) == (1, 1)


def test_page_is_reported_again_after_a_failed_read(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed read, the caller counts the page as lost. If the server still has the page, news() must report it again."""
    monkeypatch.setattr(redis_page_store, "TIMEOUT_S", 1.0)
    clock = Hours()
    it = store(server, clock)
    write(it, keys(1, 2))
    with server.stopped():
        assert read(it, keys(1)) == 0
    clock.pass_by()
    assert it.news() == News(tuple(keys(1)), ()) and read(it, keys(1, 2)) == 2


def test_worker_reads_a_full_server_when_starting(server: RedisServer) -> None:
    write(store(server), keys(1, 2))
    server.client.config_set("maxmemory", 1)
    later = RedisPageStore(server.url, PAGE, 60, IDENTITY)
    assert set(later.news().stored) == set(keys(1, 2)) and read(later, keys(1, 2)) == 2


def test_deletion_takes_effect_when_the_server_returns(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_page_store, "TIMEOUT_S", 1.0)
    clock = Hours()
    it, other = store(server, clock), store(server)
    write(it, keys(1, 2))
    other.news()
    with server.stopped():
        it.delete()
    assert read(it, keys(1)) == 0 and write(it, keys(3)).stored == ()
    clock.pass_by()
    assert it.news() == NOTHING and not server.client.keys("pages:*:p:*")
    assert set(other.news().dropped) == set(keys(1, 2)) and write(it, keys(3)).stored == tuple(keys(3))


def interrupted_scan(at_once: int) -> Iterator[list[bytes]]:
    """Yields some keys and then fails, as if the server were lost during the scan."""
    yield keys(0)[:at_once]
    raise TimeoutError


def test_number_of_reported_keys_per_call_is_limited_after_a_failed_scan(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_page_store, "NEWS_KEYS", 4)
    clock = Hours()
    first, it = store(server), RedisPageStore(server.url, PAGE, 60, IDENTITY, clock)
    many = keys(*range(6))
    write(first, many)
    with monkeypatch.context() as broken:
        broken.setattr(it, "_scanned", interrupted_scan)
        assert it.news() == NOTHING
    clock.pass_by()
    one, two = it.news(), it.news()
    assert (len(one.stored), one.more, len(two.stored), two.more) == (4, True, 2, False)
    assert {*one.stored, *two.stored} == set(many)


def test_worker_that_is_behind_reports_that_more_news_may_follow(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = store(server), store(server)
    second.news()
    for key in keys(*range(5)):
        write(first, [key])  # one entry of the news per write
    monkeypatch.setattr(redis_page_store, "NEWS_READ", 3)  # the entry that the worker knows already, and two others
    found = [second.news() for _ in range(3)]
    assert [(len(news.stored), news.more) for news in found] == [(2, True), (2, True), (1, False)]


def test_worker_drops_the_oldest_known_keys_beyond_the_limit(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_page_store, "MOST_KEYS", 4)
    first, second = store(server), store(server)
    assert write(first, keys(1, 2, 3, 4)).dropped == ()
    assert write(first, keys(5)) == Written(tuple(keys(5)), tuple(keys(1)))
    news = second.news()
    assert len(news.stored) == 4 and set(news.stored) == set(second.keys())


@pytest.mark.parametrize(
    "url", ["http://nobody", "redis://h?ssl_ca_certs=ca.crt", "rediss://h?ssl_foo=1", "redis://h?decode_responses=true"]
)
def test_store_refuses_invalid_urls(url: str) -> None:
    with pytest.raises(ValueError):
        RedisPageStore(url, PAGE, 60, IDENTITY)


class Seconds:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def quota(pages: int) -> int:
    return pages * (redis_page_store.HEAD_BYTES + PAGE)


def pages_on(server: RedisServer, tag: bytes = b"") -> set[bytes]:
    """Returns the page keys with this tag on the server."""
    names = [name.split(b":p:", 1)[1] for name in server.client.scan_iter(count=1000) if b":p:" in name]
    return {name for name in names if name.startswith(tag)}


def test_deletion_removes_the_pages_of_one_salt_for_all_workers(server: RedisServer) -> None:
    first, second = store(server), store(server)
    write(first, [*keys(1, 2, tag=A), *keys(1, 2, tag=B), *keys(1, 2)])
    second.news()
    write(second, keys(3, tag=A))
    deleted = first.delete(Selection(A))
    assert deleted == Deleted(3, tuple(keys(1, 2, tag=A))) and pages_on(server) == {*keys(1, 2, tag=B), *keys(1, 2)}
    assert set(second.news().dropped) == set(keys(1, 2, 3, tag=A))
    assert read(first, keys(1, 2, tag=B)) == 2 and (first.use().num_salts, first.use().deleted_pages) == (1, 3)
    assert write(second, keys(1, tag=A)).stored == tuple(keys(1, tag=A)), "pages that are written after the deletion stay"
    assert first.news().stored == tuple(keys(1, tag=A))


def test_deletion_by_age_uses_the_time_of_writing(server: RedisServer) -> None:
    wall = Seconds()
    it = RedisPageStore(server.url, PAGE, 60, IDENTITY, Hours(), wall=wall)
    it.news()
    write(it, [*keys(1, tag=A), *keys(1, tag=B), *keys(1)])
    wall.now += 100
    write(it, [*keys(2, tag=A), *keys(2)])
    assert read(it, keys(1, tag=A)) == 1
    assert it.delete(Selection(A, 100.0)).dropped == tuple(keys(1, tag=A))
    assert it.delete(Selection(older_than_s=101)).pages == 0
    assert set(it.delete(Selection(older_than_s=100)).dropped) == {*keys(1, tag=B), *keys(1)}
    assert pages_on(server) == {*keys(2, tag=A), *keys(2)} and read(it, keys(2)) == 1


@pytest.mark.by_day(one_in=3, seed=1)
@pytest.mark.parametrize("which", [Selection(A), Selection(), Selection(older_than_s=0)], ids=["salt", "all", "age"])
def test_deletion_is_pending_until_the_server_returns(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, which: Selection
) -> None:
    monkeypatch.setattr(redis_page_store, "TIMEOUT_S", 1.0)
    clock = Hours()
    it, other = store(server, clock), store(server)
    write(it, keys(1, 2, tag=A))
    other.news()
    with server.stopped():
        deleted = it.delete(which)
        assert deleted.pages == 0 and "does not respond" in deleted.pending
        assert write(it, keys(3, tag=A)).stored == () and read(it, keys(1, tag=A)) == 0
    assert write(it, keys(3, tag=A)).stored == (), "no page is written before the pending deletion"
    clock.pass_by()
    assert write(it, keys(4, tag=B)).stored == () and read(it, keys(1, tag=A)) == 0, (
        "no page of any salt is written or read before the pending deletion"
    )
    news = it.news()
    assert not pages_on(server) and set(news.dropped) <= set(keys(1, 2, tag=A)) and not it.keys()
    assert set(other.news().dropped) == set(keys(1, 2, tag=A))
    assert write(it, keys(3, tag=A)).stored == tuple(keys(3, tag=A)) and it.delete(which).pending == ""


def test_deletion_continues_when_the_server_was_lost_during_the_scan(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_page_store, "SCANNED", 2)
    clock = Hours()
    it = store(server, clock)
    write(it, keys(*range(30), tag=A))
    scanned = it._scanned

    def cut_short(at_once: int) -> Iterator[list[bytes]]:
        yield next(iter(scanned(at_once)))
        raise TimeoutError

    with monkeypatch.context() as broken:
        broken.setattr(it, "_scanned", cut_short)
        deleted = it.delete(Selection(A))
    assert deleted.pending and 0 < deleted.pages < 30 and len(pages_on(server)) == 30 - deleted.pages
    clock.pass_by()
    it.news()
    assert not pages_on(server) and it.use().deleted_pages == 30


def test_quota_evicts_the_oldest_pages_of_a_salt_from_all_workers(server: RedisServer) -> None:
    wall = Seconds()
    first, second = (RedisPageStore(server.url, PAGE, 60, IDENTITY, Hours(), salt_bytes=quota(4), wall=wall) for _ in range(2))
    assert first.news() == second.news() == NOTHING
    write(first, [*keys(*range(4), tag=B), *keys(*range(9))])
    for number in range(3):
        wall.now += 1
        write(first, keys(number, tag=A))
    late = RedisPageStore(server.url, PAGE, 60, IDENTITY, Hours(), salt_bytes=quota(4), wall=wall)
    late.news()  # scans the server, which does not return the keys in the order of their times
    wall.now += 1
    done = write(late, keys(3, 4, 5, tag=A))
    assert done == Written(tuple(keys(3, 4, 5, tag=A)), tuple(keys(0, 1, tag=A)))
    assert pages_on(server, A) == set(keys(2, 3, 4, 5, tag=A)) and len(pages_on(server)) == 4 + 4 + 9
    assert late.use().over_quota_pages == 2 and late.use().num_salts == 2
    assert set(second.news().stored) >= set(keys(2, 3, 4, 5, tag=A))
    assert write(second, keys(*range(10, 20), tag=A)).stored == tuple(keys(*range(10, 14), tag=A)), (
        "the quota has space for the first pages of the write"
    )
    assert pages_on(server, A) == set(keys(*range(10, 14), tag=A))


def test_quota_does_not_count_expired_pages(server: RedisServer) -> None:
    it = RedisPageStore(server.url, PAGE, 60, IDENTITY, Hours(), salt_bytes=quota(4))
    it.news()
    write(it, keys(*range(4), tag=A))
    late = RedisPageStore(server.url, PAGE, 60, IDENTITY, Hours(), salt_bytes=quota(4))
    late.news()
    for name in list(server.client.scan_iter())[:]:
        if name.endswith((keys(2, tag=A)[0], keys(3, tag=A)[0])):
            server.client.delete(name)
    done = write(late, keys(8, 9, tag=A))
    assert set(done.dropped) == set(keys(2, 3, tag=A)) and pages_on(server, A) == {*keys(0, 1, 8, 9, tag=A)}
    assert late.use().over_quota_pages == 0


def test_store_refuses_a_quota_smaller_than_a_page() -> None:
    with pytest.raises(ValueError, match="a page needs at least"):
        RedisPageStore("redis://h", PAGE, 60, IDENTITY, salt_bytes=quota(1) - 1)


WORKERS = st.integers(0, 2)
STEPS = st.one_of(
    st.tuples(st.just("write"), WORKERS, st.sampled_from([A, B, UNSALTED]), st.integers(0, 12), st.integers(1, 5)),
    st.tuples(st.just("write"), WORKERS, st.sampled_from([A, B, UNSALTED]), st.integers(0, 12), st.integers(1, 5)),
    st.tuples(st.just("delete"), WORKERS, st.sampled_from([A, B]), st.just(0), st.just(0)),
    st.tuples(st.just("news"), WORKERS, st.just(A), st.just(0), st.just(0)),
    st.tuples(st.just("expire"), WORKERS, st.sampled_from([A, B]), st.integers(0, 12), st.just(0)),
)


@settings(max_examples=200 if NIGHTLY else 25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STEPS, max_size=25))
def test_three_workers_agree_after_random_steps(server: RedisServer, steps: list[tuple[str, int, bytes, int, int]]) -> None:
    """A salt may exceed its quota only by pages of other workers whose keys the writing worker does not know yet."""
    server.client.flushall()
    workers = [RedisPageStore(server.url, PAGE, 60, IDENTITY, Hours(), salt_bytes=quota(4)) for _ in range(3)]
    for it in workers:
        it.news()
    for call, at, tag, first, count in steps:
        it = workers[at]
        match call:
            case "write":
                wanted = keys(*range(first, first + count), tag=tag)
                others = pages_on(server) - pages_on(server, tag)
                unknown = len(pages_on(server, tag) - set(it.keys()))
                done = write(it, wanted)
                assert others == pages_on(server) - pages_on(server, tag), "a write evicts no page of another salt"
                assert tag == UNSALTED or not done.stored or len(pages_on(server, tag)) <= 4 + unknown
            case "delete":
                it.delete(Selection(tag))
                assert not pages_on(server, tag)
            case "news":
                it.news()
            case "expire":
                server.client.delete(it._page_prefix + keys(first, tag=tag)[0])
        assert all(key in pages_on(server) for key in list(it.keys()) if read(it, [key]))
    for it in workers:
        while it.news().more:
            pass
        held = set(it.keys())
        assert pages_on(server) <= held, "every worker knows every page"
        write(it, keys(99, tag=A))
        assert len(pages_on(server, A)) <= 4
    for it in workers:
        it.close()


KNOWN_STEPS = st.tuples(
    st.sampled_from(["add", "add", "add without time", "set time", "drop"]),
    st.sampled_from([A, B, UNSALTED]),
    st.integers(0, 9),
    st.integers(1, 4),
)


@given(st.lists(KNOWN_STEPS, max_size=40))
def test_known_keys_equal_a_list_after_random_steps(steps: list[tuple[str, bytes, int, int]]) -> None:
    """The list has (page key, time of writing) pairs in the order in which the keys were added."""
    known, listed = KnownKeys(12), list[tuple[bytes, int | None]]()
    for call, tag, number, when in steps:
        (key,) = keys(number, tag=tag)
        held = [each for each, _ in listed]
        if call in ("add", "add without time"):
            age = when if call == "add" else None
            listed = [*(each for each in listed if each[0] != key), (key, age)]
            assert known.add([key], age) == [each for each, _ in listed[:-12]]
            listed = listed[-12:]
        elif call == "set time" and key in held:
            known.set_times({key: when})
            listed[held.index(key)] = (key, when)
        elif call == "drop":
            known.drop(key)
            listed = [each for each in listed if each[0] != key]
        assert list(known) == [each for each, _ in listed]
        for mine in (A, B, UNSALTED):
            own = [each for each in listed if each[0].startswith(mine)]
            assert known.num_with_tag(mine) == len(own) and set(known.keys_without_time(mine)) == {
                each for each, age in own if age is None
            }
            oldest = [each for each, _ in sorted(own, key=lambda each: each[1] or 0)]
            ages = dict(own)
            for count in (-1, 1, 3, 12):
                found = known.oldest(mine, count)
                assert [ages[each] or 0 for each in found] == [ages[each] or 0 for each in oldest[: max(count, 0)]]
                assert len(set(found)) == len(found)
        assert known.num_salts == len({each[:TAG_BYTES] for each, _ in listed} - {UNSALTED})

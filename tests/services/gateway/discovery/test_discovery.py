"""Tests of targets, and of discovery by static addresses and by DNS."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from rootstock_llm.services.gateway.discovery import dns
from rootstock_llm.services.gateway.discovery.endpoints import DnsTarget, KubernetesTarget, StaticTarget, parse_target
from rootstock_llm.services.gateway.discovery.watch import Discovery, check_target
from tests.services.gateway.discovery.names import Names


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("127.0.0.1:7001", StaticTarget("127.0.0.1:7001")),
        ("tokenizer_1.example:7001", StaticTarget("tokenizer_1.example:7001")),
        ("[fd00::1]:7001", StaticTarget("[fd00::1]:7001")),
        ("dns:///tokenizer.llm.svc.cluster.local:7001", DnsTarget("tokenizer.llm.svc.cluster.local", 7001)),
        ("k8s:///tokenizer.llm:7001", KubernetesTarget("tokenizer", "llm", 7001)),
        ("k8s:///tokenizer:grpc", KubernetesTarget("tokenizer", "", "grpc")),
    ],
)
def test_target_text_is_parsed_into_a_static_or_dns_or_kubernetes_target(text: str, target: object) -> None:
    assert parse_target(text) == target
    assert check_target(text) == text


@pytest.mark.by_day(one_in=3, seed=10)
@pytest.mark.parametrize(
    "text",
    [
        "host",
        ":7001",
        "host:0",
        "host:65536",
        "host:http",
        "fd00::1:7001",
        "dns:///:7001",
        "dns:///name",
        "dns:///name:grpc",
        "dns:///[fd00::1]:7001",
        "dns://8.8.8.8/name:7001",
        "k8s:///Service:7001",
        "k8s:///service:-",
        "k8s:///service:0",
        "k8s:///service:port-with-a-long-name",
    ],
)
def test_invalid_target_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^'.*\.$") as raised:
        check_target(text)
    assert str(raised.value).startswith(f"'{text}' ")
    with pytest.raises(ValueError):
        Discovery(["127.0.0.1:1", text], lambda endpoints: None)


def follow(
    targets: list[str], test: Callable[[Names, list[dict[str, bool]]], object], dns_refresh_s: float = 0.01
) -> list[dict[str, bool]]:
    """Runs a coroutine function while a Discovery runs. Returns the endpoints of each report."""

    async def run() -> list[dict[str, bool]]:
        names, reported = Names(), list[dict[str, bool]]()
        discovery = Discovery(
            targets, lambda endpoints: reported.append(dict(endpoints)), dns_refresh_s=dns_refresh_s, resolve=names.resolve
        )
        names.trouble = discovery.trouble
        task = asyncio.create_task(discovery.run())
        try:
            await test(names, reported)  # type: ignore[misc]
        finally:
            assert not task.done()
            task.cancel()
            await asyncio.wait([task])
        return reported

    return asyncio.run(run())


def test_discovery_reports_static_addresses_immediately_and_only_once() -> None:
    async def test(names: Names, reported: list[dict[str, bool]]) -> None:
        await asyncio.sleep(0)
        assert reported == [{"a:1": True, "b:2": True}]
        await asyncio.sleep(0.05)

    assert len(follow(["a:1", "b:2", "a:1"], test)) == 1


def test_discovery_reports_static_addresses_before_dns_results() -> None:
    async def test(names: Names, reported: list[dict[str, bool]]) -> None:
        names.answer = OSError("no server")
        await names.some_lookups(1)
        assert reported == [{"a:1": True}] and names.trouble() == "no server"
        names.answer = ["10.0.0.1"]
        await names.some_lookups(1)
        assert names.trouble() == ""
        assert reported[1:] == [{"a:1": True, "10.0.0.1:7": True}]

    follow(["dns:///name:7", "a:1"], test)


def test_discovery_reports_changed_dns_results() -> None:
    async def test(names: Names, reported: list[dict[str, bool]]) -> None:
        names.answer = ["10.0.0.1", "fd00::1"]
        await names.some_lookups(3)
        assert reported[-1] == {"10.0.0.1:7": True, "[fd00::1]:7": True}
        names.answer = ["fd00::1", "10.0.0.1"]
        await names.some_lookups(1)
        names.answer = ["10.0.0.2"]
        await names.some_lookups(1)
        assert reported[-1] == {"10.0.0.2:7": True}

    assert len(follow(["dns:///name:7"], test)) == 3  # an empty report and two results; a new order of addresses is not reported


def test_discovery_keeps_the_last_result_when_a_lookup_fails() -> None:
    async def test(names: Names, reported: list[dict[str, bool]]) -> None:
        names.answer = ["10.0.0.1"]
        await names.some_lookups(1)
        names.answer = socket.gaierror(socket.EAI_AGAIN, "no server answers")
        await names.some_lookups(4)
        assert reported[-1] == {"10.0.0.1:7": True}
        names.answer = ["10.0.0.2"]
        await names.some_lookups(1)
        assert reported[-1] == {"10.0.0.2:7": True}

    follow(["dns:///name:7"], test)


def test_dns_watch_removes_addresses_only_after_the_second_empty_result() -> None:
    async def test(names: Names, reported: list[dict[str, bool]]) -> None:
        names.answer = ["10.0.0.1"]
        await names.some_lookups(1)
        names.answer = []
        seen = names.lookups
        while names.lookups < seen + 4:
            if names.lookups == seen + 1:
                assert reported[-1] == {"10.0.0.1:7": True}
            await asyncio.sleep(0.001)
        assert reported[-1] == {}

    follow(["dns:///name:7"], test, dns_refresh_s=0.05)


def test_dns_watch_backs_off_after_failures() -> None:
    watch = dns.DnsWatch(DnsTarget("name", 7), 5.0, Names().resolve, lambda endpoints: None)
    assert watch._pause_s() == dns.FIRST_PAUSE_S
    watch._has_result = True
    pauses = []
    for watch._failures in (0, 1, 2, 3, 100):
        pauses.append(watch._pause_s())
    assert pauses == [5.0, 10.0, 20.0, dns.LONGEST_PAUSE_S, dns.LONGEST_PAUSE_S]


def test_dns_lookup_uses_the_system_resolver() -> None:
    async def run() -> None:
        assert "127.0.0.1" in await dns.resolve("localhost", 7)

    asyncio.run(run())


def test_dns_lookup_returns_an_empty_list_for_a_missing_name_and_raises_without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(code: int) -> list[str]:
        async def getaddrinfo(*_: object, **__: object) -> object:
            raise socket.gaierror(code, "")

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
        return await dns.resolve("name", 7)

    assert asyncio.run(run(socket.EAI_NODATA)) == asyncio.run(run(socket.EAI_NONAME)) == []
    with pytest.raises(OSError):
        asyncio.run(run(socket.EAI_AGAIN))

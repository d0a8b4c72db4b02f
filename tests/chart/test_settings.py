"""Tests that the chart's environment variables are settings of the services, with valid values and matching ports."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from charts.rootstock.values_schema import settings_schema
from rootstock_llm.services.detokenizer.settings import DetokenizerSettings
from rootstock_llm.services.gateway.config.settings import GatewaySettings
from rootstock_llm.services.shared.settings import ENV_PREFIX, ServiceSettings, load
from rootstock_llm.services.tokenizer.settings import TokenizerSettings
from rootstock_llm.services.worker.settings import WorkerSettings
from tests.chart.kubelet import environment
from tests.chart.laws import offences
from tests.chart.pods import PodTemplate, pod, pods
from tests.chart.release import NAMESPACE, Release, merged, render
from tests.chart.variants import VARIANTS, model

SERVICES: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "tokenizer": TokenizerSettings,
    "detokenizer": DetokenizerSettings,
    "worker": WorkerSettings,
}
PORTS = ("port", "health_port", "metrics_port", "control_port", "admin_port", "peer_port", "disaggregation_port")
HOSTS = {
    "port": "host",
    "health_port": "host",
    "metrics_port": "metrics_host",
    "control_port": "control_host",
    "peer_port": "peer_host",
    "disaggregation_port": "disaggregation_host",
}
# Variables that are no settings: those of other programs that a service runs, and those that the values files add.
FOREIGN = {
    "HOME",
    "TMPDIR",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "XDG_CACHE_HOME",
    "GRPC_VERBOSITY",
    "REDISCLI_AUTH",
    "FLASHINFER_WORKSPACE_BASE",
    "HTTPS_PROXY",
    "NO_PROXY",
    "NODE_NAME",
    "OTEL_RESOURCE_ATTRIBUTES",
    "INDEX_PASSWORD",
}
# Variables that the chart sets in some releases and that the value `settings` may set in others.
ASKED_FOR = {"ROOTSTOCK_ADMIN_PORT", "ROOTSTOCK_HICACHE_STORAGE_SECRET_FILE"}


class AnySecret(dict[str, dict[str, str]]):
    def __missing__(self, name: str) -> dict[str, str]:
        return {"url": "redis://:pass@redis.example.com:6379/0", "token": "t", "password": "p"}


def variables(release: Release, each: PodTemplate) -> dict[str, str]:
    return environment(release, each, each.container(), AnySecret())


def settings_of(release: Release, each: PodTemplate) -> ServiceSettings:
    """Returns the settings that the service reads from its environment in this release."""
    return loaded_with(each.service, frozenset(variables(release, each).items()))


@functools.cache
def loaded_with(service: str, found: frozenset[tuple[str, str]]) -> ServiceSettings:
    """Returns a service's settings with these variables in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in found:
            patch.setenv(name, value)
        return load(SERVICES[service], service, [])


@functools.cache
def left_open(service: str) -> set[str]:
    """Returns the variables that the value `settings` of the service may set."""
    return {ENV_PREFIX + name.upper() for name in settings_schema(service)["properties"]}


def service_pods(release: Release) -> list[PodTemplate]:
    return [each for each in pods(release) if each.service in SERVICES]


def test_every_release_has_all_services() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        yield from set(SERVICES) ^ {each.service for each in service_pods(release)}

    assert offences(law) == {}


def test_environment_variables_of_a_pod_are_settings_of_the_service() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        for each in service_pods(release):
            known = {ENV_PREFIX + field.upper() for field in SERVICES[each.service].model_fields}
            given = set(variables(release, each))
            yield from (f"{each.role}: {name}" for name in sorted(given - known - FOREIGN))
            places = {name for name in given & left_open(each.service) - ASKED_FOR if name.endswith(("_PORT", "_HOST", "_FILE"))}
            yield from (f"{each.role}: {name} is set by the chart, but `settings` accepts it too" for name in sorted(places))

    assert offences(law) == {}


def test_services_listen_on_the_declared_ports() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        for each in service_pods(release):
            loaded = settings_of(release, each)
            listening = {getattr(loaded, field) for field in PORTS if getattr(loaded, field, 0)}
            if listening != set(each.ports().values()):
                yield f"{each.role}: listens on {sorted(listening)}, declares {each.ports()}"

    assert offences(law) == {}


def test_services_listen_on_all_addresses() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        found = {}
        for each in service_pods(release):
            loaded = settings_of(release, each)
            hosts = [host for field, host in HOSTS.items() if getattr(loaded, field, 0)]
            found.update({f"{each.role}: {host}": getattr(loaded, host) for host in hosts})
        if set(found.values()) not in ({"0.0.0.0"}, {"::"}):  # all IPv4 addresses, or all IPv4 and IPv6 addresses
            yield str(found)

    assert offences(law) == {}


def test_commands_start_the_services_modules() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        for each in service_pods(release):
            container = each.container()
            if container["command"] != ["python", "-m", f"rootstock_llm.services.{each.service}"] or container.get("args"):
                yield f"{each.role}: {container['command']} {container.get('args', '')}"

    assert offences(law) == {}


def test_tokens_come_from_secrets() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        for each in service_pods(release):
            written = [variable["name"] for variable in each.container().get("env", []) if "value" in variable]
            yield from (f"{each.role}: {name}" for name in written if "TOKEN" in name)

    assert offences(law) == {}


def test_large_numbers_are_rendered_with_all_digits() -> None:
    """Large numbers are rendered in full. Helm's numbers are floats, which Go would print like 3.3554432e+07."""
    release = render(VARIANTS["tuned"])
    gateway, worker = pod(release, "gateway"), pod(release, "worker")
    assert variables(release, gateway)["ROOTSTOCK_MAX_BODY_BYTES"] == "33554432"
    assert variables(release, gateway)["ROOTSTOCK_MAX_SPECULATIVE_BLOCKS"] == "1000000"
    assert variables(release, worker)["ROOTSTOCK_MAX_TOTAL_TOKENS"] == "2000000"
    loaded = settings_of(release, worker)
    assert isinstance(loaded, WorkerSettings)
    assert (loaded.mem_fraction_static, loaded.enable_mixed_chunk) == (0.85, True)


def test_services_have_the_same_model_names() -> None:
    release = render(VARIANTS["two-models"])
    served = {(each.component, getattr(settings_of(release, each), "served_model_name", "")) for each in service_pods(release)}
    names = {"small", "Org/Large.v2"}
    assert served == {(component, name) for component in SERVICES if component != "gateway" for name in names} | {("gateway", "")}
    gateway = settings_of(release, pod(release, "gateway"))
    assert isinstance(gateway, GatewaySettings) and set(gateway.models) == names


def test_gateways_use_the_workers_control_token() -> None:
    release = render(VARIANTS["operated"])
    gateway, worker = (settings_of(release, pod(release, name)) for name in ("gateway", "worker"))
    assert isinstance(gateway, GatewaySettings) and isinstance(worker, WorkerSettings)
    assert gateway.control_token == worker.control_token == "t"
    assert (gateway.admin_port, gateway.admin_host, gateway.worker_control_addresses) == (8001, "127.0.0.1", ())
    assert gateway.peers == (f"dns:///llm-rootstock-gateway-peers.{NAMESPACE}.svc:{gateway.peer_port}",)


def test_settings_of_a_model_override_those_of_the_worker() -> None:
    over = {"worker": {"settings": {"page_size": 16, "max_running_requests": 8}}}
    large = model("large", worker={"settings": {"page_size": 32}})
    release = render(merged(over, {"models": [model("small"), large]}))
    found = {each.model: variables(release, each) for each in pods(release) if each.component == "worker"}
    assert {name: each["ROOTSTOCK_PAGE_SIZE"] for name, each in found.items()} == {"small": "16", "large": "32"}
    assert {each["ROOTSTOCK_MAX_RUNNING_REQUESTS"] for each in found.values()} == {"8"}


def test_drain_seconds_apply_to_all_services() -> None:
    release = render({"drainSeconds": 33})
    assert {settings_of(release, each).grace_s for each in service_pods(release)} == {33.0}


def test_prefill_and_decode_workers_have_separate_settings() -> None:
    over = {"worker": {"settings": {"max_prefill_tokens": 4096, "page_size": 32}}}
    apart = {"worker": {"prefill": {"settings": {"max_prefill_tokens": 8192}}}}
    release = render(merged(merged(VARIANTS["apart"], over), apart))
    found = {each.component: settings_of(release, each) for each in service_pods(release)}
    decode, prefill, gateway = found["worker"], found["prefill"], found["gateway"]
    assert isinstance(decode, WorkerSettings) and isinstance(prefill, WorkerSettings) and isinstance(gateway, GatewaySettings)
    assert (decode.disaggregation_mode, decode.disaggregation_port) == ("decode", 0)
    assert (prefill.disaggregation_mode, prefill.disaggregation_port) == ("prefill", 7103)
    assert (decode.max_prefill_tokens, prefill.max_prefill_tokens) == (4096, 8192)
    assert decode.page_size == prefill.page_size == 32
    assert gateway.workers == tuple(f"dns:///llm-rootstock-{each}.{NAMESPACE}.svc:7003" for each in ("worker", "prefill"))


def test_url_of_the_shared_kv_storage_comes_from_a_secret() -> None:
    release = render(VARIANTS["tiers-shared"])
    for component in ("worker", "prefill"):
        each = pod(release, component)
        loaded = settings_of(release, each)
        assert isinstance(loaded, WorkerSettings)
        assert loaded.enable_hierarchical_cache and (loaded.hicache_size, loaded.hicache_storage_backend) == (2, "redis")
        assert loaded.hicache_storage_url == AnySecret()["any"]["url"]
        (mount,) = [
            at for at in each.container()["volumeMounts"] if loaded.hicache_storage_secret_file.startswith(at["mountPath"])
        ]
        assert mount["readOnly"] and mount["name"] in [volume["name"] for volume in each.spec["volumes"]]

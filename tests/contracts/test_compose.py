"""compose.yaml names existing targets and settings, and its ports agree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic_settings import BaseSettings

from rootstock_llm.services import __version__
from rootstock_llm.services.local.reference import SERVICES
from rootstock_llm.services.shared.settings import of_values

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
PARTS: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = [name for name in PARTS if name in SERVICES]
REDIS_PORT = 6379
ADDRESSES = ("tokenizers", "detokenizers", "workers")


def settings_of(name: str) -> BaseSettings:
    """Returns the settings that the service reads from its environment.

    Raises:
        AssertionError: a variable does not begin with ROOTSTOCK_.
        ValueError: a variable that begins with ROOTSTOCK_ is unknown or has a wrong value.
    """
    given = {str(variable): str(value) for variable, value in PARTS[name]["environment"].items()}
    unknown = [variable for variable in given if not variable.startswith("ROOTSTOCK_")]
    assert not unknown, unknown
    values = {variable.removeprefix("ROOTSTOCK_").lower(): value for variable, value in given.items()}
    return of_values(SERVICES[name], values)


def stage(target: str) -> str:
    """Returns the lines of a target in the Dockerfile."""
    found = re.search(rf"^FROM \S+ AS {target}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    assert found, f"docker/Dockerfile has no target {target}"
    return found[1]


def ports_of(name: str) -> set[int]:
    """Returns the ports that the service's image exposes."""
    exposed = re.search(r"^EXPOSE (.+)$", stage(PARTS[name]["build"]["target"]), re.MULTILINE)
    assert exposed
    return {int(port) for port in exposed[1].split()}


def test_compose_has_every_service_of_the_system() -> None:
    assert set(OURS) == set(SERVICES) - {"local"} and set(PARTS) == {*OURS, "redis", "state"}


@pytest.mark.parametrize("name", OURS)
def test_compose_builds_each_service_from_the_docker_target_of_the_service(name: str) -> None:
    build = PARTS[name]["build"]
    assert (ROOT / build["context"] / build["dockerfile"]).samefile(ROOT / "docker" / "Dockerfile")
    assert f'ENTRYPOINT ["python", "-m", "rootstock_llm.services.{name}"]' in stage(build["target"])
    assert PARTS[name]["image"] == f"rootstock/{name}:{__version__}"


@pytest.mark.parametrize("name", OURS)
def test_compose_sets_known_settings_and_probes_the_port_of_the_service(name: str) -> None:
    settings: Any = settings_of(name)
    assert settings.host == "0.0.0.0", "the service must listen for other containers"
    *_, address, option, service = PARTS[name]["healthcheck"]["test"]
    port = settings.health_port if name == "gateway" else settings.port
    assert (address, option, service) == (f"127.0.0.1:{port}", "--service", name)
    assert port in ports_of(name) and settings.port in ports_of(name)
    if name != "gateway":
        assert (ROOT / settings.model).is_dir() and f"{settings.model}/" in stage(name).replace(
            "models/demo models", "models/demo/"
        )


def test_compose_connects_the_gateway_to_the_services_ports() -> None:
    gateway: Any = settings_of("gateway")
    for name, field in zip(("tokenizer", "detokenizer", "worker"), ADDRESSES, strict=True):
        service: Any = settings_of(name)
        assert getattr(gateway, field) == (f"{name}:{service.port}",)
    (published,) = PARTS["gateway"]["ports"]
    assert published == f"127.0.0.1:{gateway.port}:{gateway.port}", (
        "the port must be published only on this machine, because the gateway has no API keys"
    )
    worker: Any = settings_of("worker")
    assert gateway.redis_url == worker.redis_url == f"redis://redis:{REDIS_PORT}/0"
    assert gateway.state_redis_url == f"redis://state:{REDIS_PORT}/0"


def test_compose_waits_until_each_dependency_is_healthy() -> None:
    for name, part in PARTS.items():
        assert part["healthcheck"]["test"][0] == "CMD", name
        for other, condition in part.get("depends_on", {}).items():
            assert other in PARTS and condition == {"condition": "service_healthy"}
    assert set(PARTS["gateway"]["depends_on"]) == set(PARTS) - {"gateway"}


def test_compose_stores_only_the_state_in_a_volume() -> None:
    assert PARTS["state"]["volumes"] == ["state:/data"] and "state" in COMPOSE["volumes"]
    command = PARTS["state"]["command"]
    assert command[command.index("--dir") + 1] == "/data" and command[command.index("--appendonly") + 1] == "yes"
    assert "volumes" not in PARTS["redis"]
    values = yaml.safe_load((ROOT / "charts" / "rootstock" / "values.yaml").read_text())
    image = values["redis"]["image"]
    assert PARTS["redis"]["image"] == PARTS["state"]["image"] == f"docker.io/{image['repository']}:{image['tag']}"

"""Tests that each program that a Dockerfile runs is on the PATH of its image."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chart.dockerfile import read
from tests.chart.image_programs import Programs

DOCKERFILE = Path(__file__).resolve().parents[2] / "docker/Dockerfile"
BASE = "FROM python:3.11.14-slim AS app\n"
BARE = "FROM debian:12.12-slim AS app\n"
SHORT = "ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin\n"
MISSING = {
    "program outside of a shorter PATH": (f"{BASE}{SHORT}RUN true_ || groupadd x", ["true_", "groupadd"]),
    "program that dpkg calls": (
        f"{BARE}{SHORT}RUN apt-get update && apt-get install --yes g++",
        ["ldconfig", "start-stop-daemon"],
    ),
    "program of no installed package": (f"{BARE}RUN python3 -m venv /opt/venv", ["python3"]),
    "a compiler": (f"{BASE}RUN gcc -c x.c", ["gcc"]),
    "missing virtual environment": (f"{BASE}RUN pip --python /opt/venv/bin/python install x", ["/opt/venv/bin/python"]),
    "pip in an environment without pip": (
        f"{BASE}RUN python -m venv --without-pip /opt/v\nRUN /opt/v/bin/pip check",
        ["/opt/v/bin/pip"],
    ),
    "virtual environment of another stage": (
        f"{BASE}RUN python -m venv /v\n{BASE.replace('app', 'b')}RUN /v/bin/pip",
        ["/v/bin/pip"],
    ),
    "an entry point": (f'{BARE}ENTRYPOINT ["python"]', ["python"]),
    "a health check": (f'{BARE}HEALTHCHECK CMD ["python"]', ["python"]),
}


@pytest.mark.parametrize("service", ["gateway", "worker-cuda"])
def test_programs_that_the_dockerfile_runs_are_on_the_path(service: str) -> None:
    assert Programs(read(DOCKERFILE, {"SERVICE": service})).walk() == []


@pytest.mark.by_day(one_in=4, seed=25)
@pytest.mark.parametrize("name", MISSING)
def test_check_reports_programs_that_are_not_on_the_path(name: str, tmp_path: Path) -> None:
    text, programs = MISSING[name]
    (tmp_path / "Dockerfile").write_text(text)
    found = Programs(read(tmp_path / "Dockerfile")).walk()
    assert [sentence.split(" is not on ")[0].rpartition(": ")[2] for sentence in found] == programs


def test_check_finds_programs_that_earlier_build_steps_install(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(
        f"{BARE}RUN apt-get install --yes python3 && python3 -m venv /opt/venv\n"
        'FROM app AS b\nENV PATH=/opt/dev:/opt/venv/bin\nRUN pip\nENTRYPOINT ["python"]\n'
        "FROM python:3.11.14-slim AS c\nCOPY --from=b /opt/venv /srv/v\nWORKDIR /opt\nCOPY --chmod=0755 x dev/x\n"
        "RUN /srv/v/bin/pip && /opt/dev/x && /sbin/ldconfig\n"
    )
    assert Programs(read(tmp_path / "Dockerfile")).walk() == []

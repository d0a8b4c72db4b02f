"""Runs the commands of the README by day. By night, runs the commands of all pages, on this machine and on a fresh Debian."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs_commands import chroot
from tests.e2e.system import ROOT
from tests.night import NIGHTLY

PASSED = "all blocks passed"
LATER = pytest.mark.skipif(not NIGHTLY, reason="takes half an hour; runs only with ROOTSTOCK_TEST_NIGHTLY=1")
# The pages use port 8000, which is always free in a new network namespace.
ALONE = ("unshare", "--net", "bash", "-c", 'ip link set lo up && exec "$@"', "docs")


def in_network_namespace(*command: str) -> list[str]:
    """Returns a command that runs in its own network namespace.

    If this process may not create one, returns the command unchanged. Port 8000 must then be free.
    """
    try:
        subprocess.run([*ALONE, "true"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        return [*command]
    return [*ALONE, *command]


def end_of(*command: str) -> str:
    """Runs a command. Returns the last line of its output or, if it fails, the last 20,000 characters."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.stdout[-20_000:] if done.returncode else done.stdout.splitlines()[-1]


def test_readme_commands_succeed_from_top_to_bottom() -> None:
    assert end_of(*in_network_namespace(sys.executable, "-m", "tests.docs_commands", "README.md")) == PASSED


@LATER
@pytest.mark.timeout(4 * 3600)
def test_commands_of_all_pages_succeed() -> None:
    assert end_of(*in_network_namespace(sys.executable, "-m", "tests.docs_commands")) == PASSED


@LATER
@pytest.mark.timeout(6 * 3600)
def test_nightly_commands_of_all_pages_succeed() -> None:
    """Uses the machine's network, because some commands install packages."""
    others = [str(page) for page in sorted((ROOT / "docs").rglob("*.md"))]  # README's commands run in the chroot
    assert end_of(sys.executable, "-m", "tests.docs_commands", "--nightly", *others) == PASSED


@LATER
@pytest.mark.timeout(6 * 3600)
@pytest.mark.skipif(not chroot.is_permitted(), reason="no chroot can be made here")
def test_all_commands_succeed_on_a_fresh_debian_with_the_packages_in_the_readme(tmp_path: Path) -> None:
    assert end_of(sys.executable, "-m", "tests.docs_commands.chroot", str(tmp_path / "chroot"), "--nightly") == PASSED

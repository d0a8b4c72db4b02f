"""No test is skipped silently. A skip that tests/skips.py does not list fails, and a listed skip is in the summary."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.skips import ALLOWED, PACKAGES, allowed, missing_program

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = "from tests.conftest import *  # noqa: F403\n"
SKIPS = {
    "at run": "import pytest\ndef test_a(): pytest.skip('the moon')\n",
    "by a mark": "import pytest\n@pytest.mark.skipif(True, reason='the moon')\ndef test_a(): pass\n",
    "by a fixture": "import pytest\n@pytest.fixture\ndef it(): pytest.skip('the moon')\ndef test_a(it): pass\n",
    "at collection": "import pytest\npytest.importorskip('no_such_module', reason='the moon')\ndef test_a(): pass\n",
    "for a reason of another folder": "import pytest\ndef test_a(): pytest.skip('torch sees no GPU')\n",
}


def pytest_of(folder: Path, source: str, path: str = "tests/test_one.py") -> subprocess.CompletedProcess[str]:
    """Runs pytest on this source with the repository's conftest and an empty PATH."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = needs(program, ...): x\n")
    (folder / path).parent.mkdir(parents=True)
    (folder / path).write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(folder / path)]
    env = {"PYTHONPATH": str(ROOT), "PATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.by_day(one_in=5)
@pytest.mark.parametrize("how", SKIPS)
def test_skipped_test_fails_when_the_reason_is_not_listed(how: str, tmp_path: Path) -> None:
    done = pytest_of(tmp_path, SKIPS[how])
    assert done.returncode != 0, done.stdout
    assert "skipped for a reason that tests/skips.py does not list" in done.stdout and "1 skipped" not in done.stdout


def test_missing_program_is_reported_with_the_package(tmp_path: Path) -> None:
    done = pytest_of(tmp_path, "import pytest\n@pytest.mark.needs('promtool')\ndef test_a(): pass\n")
    assert done.returncode == 0, done.stdout
    assert "skipped: 1 × promtool is not on PATH (missing: Debian's package prometheus)" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("1 skipped in ")


def test_program_without_a_known_package_is_refused() -> None:
    with pytest.raises(ValueError, match="one or more of"):
        missing_program(("no-such-program",))


def test_allowed_reason_applies_only_to_listed_folders() -> None:
    assert allowed("torch sees no GPU", "tests/gpu/test_sync.py")
    assert allowed("torch sees no GPU", "tests/exec/test_sync.py") is None


def test_documentation_of_tests_lists_every_optional_package() -> None:
    text = (ROOT / "docs/how-to/test.md").read_text()
    assert all(f"`{package}`" in text for package in PACKAGES.values())
    assert all((ROOT / folder).is_dir() for skip in ALLOWED for folder in skip.folders)

"""python -m tests.clients [PART ...]: runs unmodified public clients against the whole system with the demo model.

| part | clients |
|---|---|
| node | the official OpenAI and Anthropic clients |
| browser | the OpenAI client on a page of another origin, and the gateway's own pages, in Debian's chromium |
| frameworks | agents of three public frameworks |

The packages that a part's folder lists are installed into build/clients. Prints the result of each part. The exit status is 1 if
a part fails or a needed program is not on PATH. Pictures of the gateway's pages are written to build/clients/pictures, or to the
folder in the variable PICTURES.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Mapping
from pathlib import Path

from rootstock_llm.services.local.ports import HOST, free_ports
from tests.e2e.system import ROOT, System

HERE, BUILT = Path(__file__).parent, ROOT / "build" / "clients"
FRAMEWORKS = ("openai_agents", "pydantic_agents", "langchain_agents")
PROGRAMS = {"node": ("node", "npm"), "browser": ("node", "npm", "chromium"), "frameworks": ()}
LIMIT_S = 600

Env = Mapping[str, str]


def node_modules() -> Path:
    """Returns a folder with the node tests and their installed npm packages."""
    folder = BUILT / "node"
    shutil.copytree(HERE / "node", folder, dirs_exist_ok=True)
    subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--silent"], cwd=folder, check=True)
    return folder


def node(env: Env) -> list[str]:
    return failed(["node", "--test", "--test-reporter=spec", "openai.test.mjs", "anthropic.test.mjs"], node_modules(), env)


def browser(env: Env) -> list[str]:
    pictures = Path(os.environ.get("PICTURES", BUILT / "pictures")).resolve()
    pictures.mkdir(parents=True, exist_ok=True)
    more = {**env, "CHROMIUM": shutil.which("chromium") or "", "PICTURES": str(pictures)}
    folder = node_modules()
    return [failure for name in ("browser", "playground") for failure in failed(["node", f"{name}.mjs"], folder, more)]


def frameworks(env: Env) -> list[str]:
    folder = BUILT / "frameworks"
    venv.create(folder, with_pip=True)
    pip = [
        str(folder / "bin/pip"),
        "install",
        "-q",
        "--disable-pip-version-check",
        "-r",
        str(HERE / "frameworks/requirements.txt"),
    ]
    subprocess.run(pip, check=True)
    python = str(folder / "bin/python")
    return [failure for name in FRAMEWORKS for failure in failed([python, f"{name}.py"], HERE / "frameworks", env)]


def failed(argv: list[str], folder: Path, env: Env) -> list[str]:
    """Runs a command. Returns [the command] if it fails, and an empty list otherwise."""
    ended = subprocess.run(argv, cwd=folder, env={**os.environ, **env}, timeout=LIMIT_S, check=False)
    return [" ".join(argv)] if ended.returncode else []


PARTS: dict[str, Callable[[Env], list[str]]] = {"node": node, "browser": browser, "frameworks": frameworks}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"parts to run: {', '.join(PARTS)}; all by default")
    names = parser.parse_args().parts or list(PARTS)
    if unknown := set(names) - PARTS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    missing = sorted({program for name in names for program in PROGRAMS[name] if shutil.which(program) is None})
    if missing:
        print(f"not on PATH: {', '.join(missing)}; install Debian's packages nodejs, npm and chromium", file=sys.stderr)
        return 1
    allowed, other = free_ports(2)
    flags = f"--cors-allow-origins http://{HOST}:{allowed}"
    with tempfile.TemporaryDirectory() as folder, System(Path(folder), gateway_flags=flags, log_level="warning") as system:
        env = {"ROOTSTOCK_URL": system.url, "ALLOWED_PORT": str(allowed), "OTHER_PORT": str(other)}
        ends = {name: PARTS[name](env) for name in names}
    for name, faults in ends.items():
        print(f"{name}: {'failed: ' + '; '.join(faults) if faults else 'passed'}")
    return int(any(ends.values()))


if __name__ == "__main__":
    sys.exit(main())

"""Checks that the programs for a run are installed. As root, installs the Debian packages of missing programs with apt-get."""

from __future__ import annotations

import os
import shutil
import sys

from tests.cluster.kubernetes import run

# Program → its Debian package. A local cluster needs the programs of both tables.
ALWAYS = {"buildah": "buildah", "redis-server": "redis-server", "redis-cli": "redis-tools", "openssl": "openssl"}
OF_A_LOCAL_CLUSTER = {
    "containerd": "containerd",
    "runc": "runc",
    "nft": "nftables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "debootstrap": "debootstrap",  # makes the base image if no registry has it
}
TOOLS = ("helm", "kubectl")  # checked for an existing cluster; the command of a local cluster provides them
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # Debian installs some of these programs in sbin folders


def provide(local: bool) -> None:
    """Installs missing packages. Exits with a message if a program is still missing.

    Args:
        local: whether the run starts a cluster on this machine, which needs further programs.
    """
    wanted = ALWAYS | OF_A_LOCAL_CLUSTER if local else ALWAYS
    packages = _missing(wanted)
    if packages and os.geteuid() == 0 and shutil.which("apt-get"):
        print(f"installing {', '.join(packages)}", flush=True)
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        run("apt-get", "update", env=quiet)
        run("apt-get", "install", "--yes", "--no-install-recommends", *packages, env=quiet)
        packages = _missing(wanted)
    if packages:
        sys.exit(f"programs are missing; as root, run: apt-get install {' '.join(packages)}")
    tools = [name for name in TOOLS if not local and shutil.which(name) is None]
    if tools:
        sys.exit(f"programs are not on PATH: {', '.join(tools)}")


def _missing(wanted: dict[str, str]) -> list[str]:
    return sorted({package for program, package in wanted.items() if shutil.which(program, path=PATH) is None})

"""A network namespace with one virtual cable to this machine. A test can cut the cable, which then drops packets silently."""

from __future__ import annotations

import os
import subprocess
from functools import cache

PREFIX = "rootstock-"
PREFIX_BITS = 30  # four addresses: network, near end, far end, broadcast
UNUSED_MAC = "02:00:00:00:00:01"  # link-layer address that no interface has, so that packets to it are dropped


class Namespace:
    """A network namespace and a virtual cable to it. The cable's ends have the addresses `near` (this machine) and `far`.

    `other` is a second address of the near end. After lose_other(), the far side can reach `near` but not `other`. Creating the
    namespace needs the rights that is_permitted() checks.
    """

    def __init__(self) -> None:
        tag = os.getpid() & 0x3FFF
        self.name = f"{PREFIX}{os.getpid()}"
        self._cable, self._far_cable = f"rsn{tag}", f"rsf{tag}"
        block = f"198.18.{tag >> 6}"  # address range for network benchmarks, RFC 2544
        self.near, self.far = f"{block}.{(tag & 63) * 4 + 1}", f"{block}.{(tag & 63) * 4 + 2}"
        self.other = f"198.19.{tag >> 6}.{(tag & 63) * 4 + 1}"

    def __enter__(self) -> Namespace:
        _remove_orphans()
        _ip("netns", "add", self.name)
        _ip("link", "add", self._cable, "type", "veth", "peer", "name", self._far_cable, "netns", self.name)
        _ip("addr", "add", f"{self.near}/{PREFIX_BITS}", "dev", self._cable)
        _ip("addr", "add", f"{self.other}/32", "dev", self._cable)
        _ip("link", "set", self._cable, "up")
        _ip("-n", self.name, "addr", "add", f"{self.far}/{PREFIX_BITS}", "dev", self._far_cable)
        _ip("-n", self.name, "link", "set", "lo", "up")
        self.join()
        return self

    def __exit__(self, *_: object) -> None:
        """Removes the cable and the namespace. Processes on the far side must have ended."""
        _ip("link", "del", self._cable)
        _ip("netns", "del", self.name)

    def argv(self, command: list[str]) -> list[str]:
        """Returns a command that runs `command` in the namespace. The process keeps its id."""
        return ["ip", "netns", "exec", self.name, *command]

    def cut(self) -> None:
        _ip("-n", self.name, "link", "set", self._far_cable, "down")

    def join(self) -> None:
        _ip("-n", self.name, "link", "set", self._far_cable, "up")
        _ip("-n", self.name, "route", "replace", f"{self.other}/32", "dev", self._far_cable)

    def lose_other(self) -> None:
        """Silently drops all packets from the far side to `other`."""
        _ip("-n", self.name, "neigh", "replace", self.other, "lladdr", UNUSED_MAC, "dev", self._far_cable, "nud", "permanent")

    def find_other(self) -> None:
        _ip("-n", self.name, "neigh", "del", self.other, "dev", self._far_cable)


def _remove_orphans() -> None:
    """Removes namespaces whose creating process was killed. The kernel removes a cable together with its far end."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0]
        owner = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
            _ip("netns", "del", name)


@cache
def is_permitted() -> bool:
    """Whether this process may create network namespaces and virtual cables on this machine."""
    probe = f"{PREFIX}probe-{os.getpid()}"
    try:
        _ip("netns", "add", probe)
    except (OSError, subprocess.CalledProcessError):
        return False
    try:
        _ip("-n", probe, "link", "add", "probe0", "type", "veth", "peer", "name", "probe1")
    except subprocess.CalledProcessError:
        return False
    finally:
        _ip("netns", "del", probe)
    return True


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=60).stdout

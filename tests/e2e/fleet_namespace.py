"""A network namespace with one virtual cable to this machine, which can be cut: packets are dropped and nobody is told."""

from __future__ import annotations

import os
import subprocess
from functools import cache

PREFIX = "rootstock-"
PREFIX_BITS = 30  # four addresses: network, this side, far side, broadcast
NOBODY = "02:00:00:00:00:01"  # a link address that nobody has: who gets a packet for it drops it


class Namespace:
    """Needs `is_permitted`. `near` and `far` are the two ends' addresses; `argv` runs a command on the far side, same pid.
    `other` is one more address of the near end, which alone can be lost."""

    def __init__(self) -> None:
        tag = os.getpid() & 0x3FFF
        self.name = f"{PREFIX}{os.getpid()}"
        self._cable, self._far_cable = f"rsn{tag}", f"rsf{tag}"
        block = f"198.18.{tag >> 6}"  # the range that is set aside for tests between networks
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
        """Processes on the far side must have ended."""
        _ip("link", "del", self._cable)
        _ip("netns", "del", self.name)

    def argv(self, command: list[str]) -> list[str]:
        return ["ip", "netns", "exec", self.name, *command]

    def cut(self) -> None:
        _ip("-n", self.name, "link", "set", self._far_cable, "down")

    def join(self) -> None:
        _ip("-n", self.name, "link", "set", self._far_cable, "up")
        _ip("-n", self.name, "route", "replace", f"{self.other}/32", "dev", self._far_cable)

    def lose_other(self) -> None:
        """What the far side says to `other` is dropped, and nobody is told."""
        _ip("-n", self.name, "neigh", "replace", self.other, "lladdr", NOBODY, "dev", self._far_cable, "nud", "permanent")

    def find_other(self) -> None:
        _ip("-n", self.name, "neigh", "del", self.other, "dev", self._far_cable)


def _remove_orphans() -> None:
    """Those of processes that were killed before they could clean up; a cable goes with its far end."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0]
        owner = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
            _ip("netns", "del", name)


@cache
def is_permitted() -> bool:
    """Whether this process may make namespaces and cables here."""
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

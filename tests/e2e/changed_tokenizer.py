"""Restarts a system's tokenizer with other flags, so that tests of formats and chat templates can share one system."""

from __future__ import annotations

from rootstock_llm.services.local.supervisor import Command
from tests.e2e.system import System, wait_until


class ChangedTokenizer:
    """Restarts the system's only tokenizer with other flags."""

    def __init__(self, system: System) -> None:
        self.system = system
        self._argv = system.parts["tokenizer"].command.argv
        self._flags: tuple[str, ...] = ()

    def set(self, *flags: str) -> System:
        """Restarts the tokenizer with these additional flags, unless it already has them."""
        if flags != self._flags:
            system, name = self.system, "tokenizer"
            system.kill(name)
            wait_until(lambda: system.status("/readiness") != 200, 60, "the gateway to lose the tokenizer")
            system.children[name].command = Command(name, [*self._argv, *flags])
            system.start(name)
            system.wait_ready()
            self._flags = flags
        return self.system

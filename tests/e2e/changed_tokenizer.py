"""A system whose tokenizer is started again with other flags: its formats and its chat template change, the model stays."""

from __future__ import annotations

from services.local.supervisor import Command
from tests.e2e.system import System, wait_until


class ChangedTokenizer:
    """Owns the flags of the system's one tokenizer."""

    def __init__(self, system: System) -> None:
        self.system = system
        self._argv = system.parts["tokenizer"].command.argv
        self._flags: tuple[str, ...] = ()

    def set(self, *flags: str) -> System:
        """Starts the tokenizer again with more flags. A tokenizer that has these flags already goes on."""
        if flags != self._flags:
            system, name = self.system, "tokenizer"
            system.kill(name)
            wait_until(lambda: system.status("/readiness") != 200, 60, "the gateway to miss the tokenizer")
            system.children[name].command = Command(name, [*self._argv, *flags])
            system.start(name)
            system.wait_ready()
            self._flags = flags
        return self.system

"""The compiling process: `python -m services.worker.grammar.compile.compiler_child`, started by CompilerPool with a socket as its
stdin.

xgrammar loads transformers to know its tokenizers by their types. This process has none of those, and does without: a third of
its start, and 20 MiB.
"""

from __future__ import annotations

import sys
from types import ModuleType


class WithoutTransformers(ModuleType):
    """Any type that is asked for, of which there will be no object."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def main() -> None:
    sys.modules["transformers"] = WithoutTransformers("transformers")
    from services.worker.grammar.compile import forking_compiler  # loads xgrammar

    forking_compiler.serve()


if __name__ == "__main__":
    main()

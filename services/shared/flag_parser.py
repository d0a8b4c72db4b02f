"""The argument parser of the services and of `rootstock`.

Each error is one line. The error for an unknown flag suggests a similar flag if there is one.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

LIKENESS = 0.7  # a name counts as a misspelling of another name if their difflib ratio is at least this


class FlagParser(argparse.ArgumentParser):
    """An argument parser whose subcommands have parsers of the same class, so that each suggests its own flags."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parses arguments. Exits with status 2 if one is unknown; the message suggests a similar flag of the same command."""
        words = list(sys.argv[1:] if args is None else args)
        if any(isinstance(action, argparse._SubParsersAction) for action in self._actions):
            # Flags before a command take no values. Without this check, argparse would report a missing command instead.
            leading = itertools.takewhile(lambda word: word.startswith("-"), words)
            if unknown := [word for word in leading if word not in self._option_string_actions]:
                self.error(self._refusal(unknown))
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(self._refusal(unknown))
        return parsed, unknown

    def _match_arguments_partial(self, actions: Sequence[argparse.Action], arg_strings_pattern: str) -> list[int]:
        """Returns the number of words of each positional argument that argparse can fill before the next flag.

        An optional argument without a word is left for the words after the flag. argparse of Python 3.11 counts it as absent, and
        would refuse FILE in `batch submit --wait FILE`.
        """
        counts = super()._match_arguments_partial(actions, arg_strings_pattern)
        if arg_strings_pattern.startswith("O", sum(counts)):
            while counts and not counts[-1]:
                counts.pop()
        return counts

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")

    def _refusal(self, unknown: Sequence[str]) -> str:
        """Returns the message for unknown arguments. It does not contain values, because a value may be a secret."""
        flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        if not flags:
            return f"arguments without a flag: {len(unknown)}; --help lists the flags."
        return " ".join(map(self._unknown_flag, flags))

    def _unknown_flag(self, flag: str) -> str:
        like = nearest(flag, self._option_string_actions)
        return f"unknown flag {flag}; " + (f"did you mean {like}?" if like else "--help lists the flags.")


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the known name that `name` probably misspells, or an empty string."""
    by_word = {each.lstrip("-").replace("-", "_"): each for each in known}
    found = difflib.get_close_matches(name.lstrip("-").replace("-", "_").lower(), by_word, n=1, cutoff=LIKENESS)
    return by_word[found[0]] if found else ""

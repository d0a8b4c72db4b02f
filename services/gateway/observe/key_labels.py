"""Names of API keys as label values. They are bounded: those that come first have a label each, all others share one."""

from __future__ import annotations

OTHER = "other"


class KeyLabels:
    """most: of labels, besides the one that is shared."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._named: set[str] = set()

    def label(self, key: str) -> str:
        """key: its name, "" where there are none: then the label is empty, which is as good as not there."""
        if key and key not in self._named:
            if len(self._named) >= self._most:
                return OTHER
            self._named.add(key)
        return key

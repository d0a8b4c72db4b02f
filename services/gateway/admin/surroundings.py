"""What a gateway sees of what it stands on, for people: Redis, names, files, and whether its metrics are asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from services.gateway.observe.metrics import KeySigns
from services.shared.tls.mutual_tls import MutualTls


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Each callable is asked on the event loop, and answers from memory. index: whether the index's Redis answers; kept:
    whether what clients have kept is to be had; None where there is none. keys, tls: None where there are none. names: by
    service, why a name of its targets cannot be looked up, "" if all can. scraped_s_ago: since the metrics were asked for last,
    None for never."""

    index: Callable[[], bool | None]
    kept: Callable[[], bool | None]
    keys: KeySigns | None
    tls: MutualTls | None
    names: Mapping[str, Callable[[], str]]
    scraped_s_ago: Callable[[], float | None]

    def told(self) -> dict[str, Any]:
        """Of names only whose they are: clients have no use for an address."""
        keys, scraped = self.keys, self.scraped_s_ago()
        return {
            "redis": {"index": self.index(), "limits": keys and keys.shares_are_up(), "kept": self.kept()},
            "key_file_valid": keys and keys.file_is_valid(),
            "tls_files_valid": self.tls and self.tls.files.valid,
            "certificate_ends_in_s": self.tls and round(_not_after(self.tls) - time.time()),
            "unresolved": sorted(service for service, trouble in self.names.items() if trouble()),
            "scraped_s_ago": scraped if scraped is None else round(scraped, 1),
        }


def _not_after(tls: MutualTls) -> float:
    """0 for a certificate that had expired when it was read."""
    named = tls.files.now().named
    return 0.0 if named is None else named.not_after

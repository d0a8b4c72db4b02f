"""What one key may still use here: requests and tokens within a minute, and requests at once. Pure; times are Unix seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.gateway.keys.key_table import ApiKey
from services.gateway.keys.rate_window import BUCKETS, seconds_until
from services.gateway.keys.share import Answer, Report, Share
from services.gateway.keys.usage import Concurrent, PerMinute, Usage

REQUESTS, TOKENS, CONCURRENT = "requests", "tokens", "concurrency"
KINDS = (REQUESTS, TOKENS, CONCURRENT)
SIZES = {REQUESTS: BUCKETS, TOKENS: BUCKETS, CONCURRENT: 1}
_SAID = {REQUESTS: "requests per minute", TOKENS: "tokens per minute", CONCURRENT: "requests at once"}


@dataclass(eq=False)
class OverLimit(Exception):
    """kind: of the limit. retry_s: after how many seconds it may pass, None for never: it asks for more than the limit."""

    kind: str
    limit: int
    used: int
    asked: int
    retry_s: int | None

    @property
    def message(self) -> str:
        if self.retry_s is None:
            return (
                f"Request too large for this API key's limit of {self.limit} {_SAID[self.kind]}: it asks for {self.asked}, "
                "prompt and longest answer together."
            )
        return (
            f"Rate limit reached for this API key: {_SAID[self.kind]}: limit {self.limit}, used {self.used}, asked for "
            f"{self.asked}. Try again in {self.retry_s} s."
        )


class KeyBudget:
    """digest: the key's name as Redis has it."""

    def __init__(self, key: ApiKey, digest: str) -> None:
        self.digest = digest
        self.shares: dict[str, Share] = {}
        self.reported_at = 0.0
        self.set_key(key)

    def set_key(self, key: ApiKey) -> None:
        """Limits may have changed; what has been used has not."""
        for kind, limit in zip(KINDS, (key.requests_per_minute, key.tokens_per_minute, key.max_concurrent), strict=True):
            share = self.shares.get(kind)
            if limit is None:
                self.shares.pop(kind, None)
            elif share is None:
                self.shares[kind] = Share(limit, _usage(kind), _usage(kind))
            else:
                share.set_limit(limit)

    def begin(self, now: float, gateways: int) -> Share | None:
        """One more request. Returns what it occupies until it ends, if anything. Raises OverLimit."""
        wanted = [(kind, share) for kind in (CONCURRENT, REQUESTS) if (share := self.shares.get(kind)) is not None]
        for kind, share in wanted:
            if not share.available(now, gateways):
                share.take(1, now, gateways)  # is asked for
                raise self._over(kind, share, 1, now, gateways)
        for _, share in wanted:
            share.take(1, now, gateways)
        return self.shares.get(CONCURRENT)

    def reserve(self, tokens: int, now: float, gateways: int) -> Share | None:
        """Returns whose they are, if they are limited. Raises OverLimit."""
        share = self.shares.get(TOKENS)
        if share is not None and (tokens > share.limit or not share.take(tokens, now, gateways)):
            raise self._over(TOKENS, share, tokens, now, gateways)
        return share

    def headers(self, now: float) -> list[tuple[bytes, bytes]]:
        """OpenAI's, of the limits per minute that there are."""
        found = []
        for kind in (REQUESTS, TOKENS):
            share = self.shares.get(kind)
            if share is not None:
                amounts, name = share.amounts(now), kind.encode()
                found.append((b"x-ratelimit-limit-" + name, b"%d" % share.limit))
                found.append((b"x-ratelimit-remaining-" + name, b"%d" % max(0, share.limit - sum(amounts))))
                found.append((b"x-ratelimit-reset-" + name, duration(seconds_until(amounts, 0, now)).encode()))
        return found

    def _over(self, kind: str, share: Share, asked: int, now: float, gateways: int) -> OverLimit:
        retry_s = None if asked > share.limit else max(1, math.ceil(share.seconds_until(asked, now, gateways)))
        return OverLimit(kind, share.limit, share.used(now), asked, retry_s)

    # For the refill

    @property
    def dirty(self) -> bool:
        return any(share.dirty for share in self.shares.values())

    @property
    def runs_low(self) -> bool:
        return any(share.runs_low for share in self.shares.values())

    def report(self, now: float, gateways: int) -> list[Report]:
        """One for each of KINDS; of those that are not limited, with limit 0."""
        self.reported_at = now
        none = [Report(0, 0, 0, 0, 0, [0] * SIZES[kind]) for kind in KINDS]
        return [self.shares[kind].report(now, gateways) if kind in self.shares else none[i] for i, kind in enumerate(KINDS)]

    def answered(self, answers: list[Answer], settled: bool, now: float) -> None:
        for kind, answer in zip(KINDS, answers, strict=True):
            if (share := self.shares.get(kind)) is not None:
                share.answered(answer, settled, now)

    def someone_came(self) -> None:
        for share in self.shares.values():
            share.someone_came()

    def go_alone(self, now: float) -> None:
        for share in self.shares.values():
            share.go_alone(now)


def _usage(kind: str) -> Usage:
    return Concurrent() if kind == CONCURRENT else PerMinute()


def duration(seconds: float) -> str:
    """As OpenAI writes it: 120ms, 1s, 6m0s."""
    if 0 < seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    return f"{whole // 60}m{whole % 60}s" if whole >= 60 else f"{whole}s"

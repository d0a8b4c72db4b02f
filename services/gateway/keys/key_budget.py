"""The budget of one API key at this gateway: its limits of requests and tokens per minute, and of concurrent requests.

Pure: the clock is an argument, in Unix seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rootstock_llm.services.gateway.keys.key_table import ApiKey
from rootstock_llm.services.gateway.keys.share import Share, ShareReply, ShareReport
from rootstock_llm.services.gateway.keys.usage import BUCKETS, Concurrent, PerMinute, Usage, seconds_until

REQUESTS, TOKENS, CONCURRENT = "requests", "tokens", "concurrency"
KINDS = (REQUESTS, TOKENS, CONCURRENT)
SIZES = {REQUESTS: BUCKETS, TOKENS: BUCKETS, CONCURRENT: 1}  # length of Usage.amounts(), by kind of limit
_KIND_NAMES = {REQUESTS: "requests per minute", TOKENS: "tokens per minute", CONCURRENT: "concurrent requests"}


@dataclass(eq=False)
class OverLimit(Exception):
    """A request exceeds a limit of its API key. The client may send it again after retry_s."""

    kind: str  # kind of the limit, one of KINDS
    limit: int  # value of the limit
    used: int  # amount in use, over all gateways
    asked: int  # amount that the request needs
    retry_s: int | None  # seconds, or None if the request needs more than the whole limit, so that a retry cannot succeed

    @property
    def message(self) -> str:
        if self.retry_s is None:
            return (
                f"Request too large for this API key's limit of {self.limit} {_KIND_NAMES[self.kind]}: it needs {self.asked}, "
                "prompt and longest completion together. Ask for fewer tokens."
            )
        return (
            f"Rate limit reached for this API key: {_KIND_NAMES[self.kind]}: limit {self.limit}, used {self.used}, requested "
            f"{self.asked}. Try again in {self.retry_s} s."
        )


class KeyBudget:
    """The shares that this gateway has of the limits of one API key. Used only on the event loop."""

    def __init__(self, key: ApiKey, digest: str) -> None:
        """Makes the budget.

        Args:
            digest: Digest of the API key's name, which Redis gets in place of the name.
        """
        self.digest = digest
        self.shares: dict[str, Share] = {}
        self.reported_at = 0.0  # Unix seconds of the last report()
        self.set_key(key)

    def set_key(self, key: ApiKey) -> None:
        """Applies the current limits of the API key. The used amounts do not change."""
        for kind, limit in zip(KINDS, (key.requests_per_minute, key.tokens_per_minute, key.max_concurrent), strict=True):
            share = self.shares.get(kind)
            if limit is None:
                self.shares.pop(kind, None)
            elif share is None:
                self.shares[kind] = Share(limit, _usage(kind), _usage(kind))
            else:
                share.set_limit(limit)

    def begin(self, now: float, gateways: int) -> Share | None:
        """Counts a request that starts.

        Returns:
            The share of concurrent requests, to which the caller gives 1 back when the request ends. None if the API key has
            no limit of concurrent requests.

        Raises:
            OverLimit: A limit is reached. Nothing is counted.
        """
        wanted = [(kind, share) for kind in (CONCURRENT, REQUESTS) if (share := self.shares.get(kind)) is not None]
        for kind, share in wanted:
            if not share.available(now, gateways):
                share.take(1, now, gateways)  # returns False, but records the refused amount for the next report to Redis
                raise self._over(kind, share, 1, now, gateways)
        for _, share in wanted:
            share.take(1, now, gateways)
        return self.shares.get(CONCURRENT)

    def reserve(self, tokens: int, now: float, gateways: int) -> Share | None:
        """Counts the tokens that a request is expected to use at most.

        Returns:
            The share of tokens, which the caller corrects with settle() when the request ends. None if tokens have no limit.

        Raises:
            OverLimit: The limit is reached. Nothing is counted.
        """
        share = self.shares.get(TOKENS)
        if share is not None and (tokens > share.limit or not share.take(tokens, now, gateways)):
            raise self._over(TOKENS, share, tokens, now, gateways)
        return share

    def headers(self, now: float) -> list[tuple[bytes, bytes]]:
        """Returns OpenAI's x-ratelimit headers for the limits per minute that the API key has."""
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

    # Methods for ShareRefill.

    @property
    def dirty(self) -> bool:
        return any(share.dirty for share in self.shares.values())

    @property
    def runs_low(self) -> bool:
        return any(share.runs_low for share in self.shares.values())

    def report(self, now: float, gateways: int) -> list[ShareReport]:
        """Returns one report for each of KINDS. The limit in the report is 0 if the API key has no limit of this kind."""
        self.reported_at = now
        none = [ShareReport(0, 0, 0, 0, 0, [0] * SIZES[kind]) for kind in KINDS]
        return [self.shares[kind].report(now, gateways) if kind in self.shares else none[i] for i, kind in enumerate(KINDS)]

    def answered(self, answers: list[ShareReply], settled: bool, now: float) -> None:
        for kind, answer in zip(KINDS, answers, strict=True):
            if (share := self.shares.get(kind)) is not None:
                share.answered(answer, settled, now)

    def gateway_joined(self) -> None:
        for share in self.shares.values():
            share.gateway_joined()

    def go_alone(self, now: float) -> None:
        for share in self.shares.values():
            share.go_alone(now)


def _usage(kind: str) -> Usage:
    return Concurrent() if kind == CONCURRENT else PerMinute()


def duration(seconds: float) -> str:
    """Formats a duration as OpenAI does: 120ms, 1s, 6m0s."""
    if 0 < seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    return f"{whole // 60}m{whole % 60}s" if whole >= 60 else f"{whole}s"

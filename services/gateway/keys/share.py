"""The share that one gateway has of one limit of an API key. The clock is an argument (Unix seconds); no method awaits.

A share is in one of two modes:

- Shared: Each gateway reports to Redis the amount that it has used of the limit, and the unused amount that it holds. Redis
  grants only amounts that no gateway has used or holds. A gateway takes from its `held` amount without a round trip. So all
  gateways together stay within the limit.
- Alone, before the first reply of Redis and while Redis is unreachable: The gateway may use its part, which is the limit divided
  by the number of gateways last seen. For ALONE_S after the loss of Redis, it may use at most the amount that it had used or held
  at the loss, because the amounts that other gateways used before the loss still count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rootstock_llm.services.gateway.keys.usage import BUCKET_S, WINDOW_S, Usage, seconds_until

ALONE_S = WINDOW_S + 2 * BUCKET_S  # seconds after the loss of Redis from which no amount used before it counts
YIELD_S = 6.0  # seconds after yielding to other gateways in which a share requests no reserve
PATIENCE_S = 5.0  # seconds after a refusal in which the refused amount is requested again
GATHER_S = 5.0  # seconds after a gateway has joined in which a share that is too small keeps requesting


@dataclass(frozen=True, slots=True)
class ShareReport:
    """A gateway's report on its share of one limit, with the requested amount."""

    limit: int  # limit over all gateways
    least: int  # requested amount that is granted as a whole if it is free
    most: int  # requested amount of which at most half of the free amount is granted
    held: int  # unused amount that the gateway holds
    unmet: int  # amount that the gateway has refused to requests since its last report
    amounts: Sequence[int]  # used amounts, as in Usage.amounts()


@dataclass(frozen=True, slots=True)
class ShareReply:
    """The reply to a ShareReport."""

    granted: int  # change of the held amount; negative if the gateways hold more than the limit, because one has joined
    in_need: bool  # other gateways were not granted the amounts that they requested
    others: Sequence[int]  # amounts used by the other gateways, as in Usage.amounts()


class Share:
    """The share that this gateway has of one limit of an API key. Belongs to the event loop."""

    def __init__(self, limit: int, own: Usage, others: Usage) -> None:
        self.limit = limit  # over all gateways
        self.dirty = True  # something is to be reported
        self.held = 0  # unused amount that this gateway may take while it is shared
        self.is_shared = False  # Redis grants amounts, see above
        self._own = own
        self._others = others  # by the last reply
        self._entitled: int | None = None  # used and held amount when Redis was lost; None: it was never shared
        self._alone_since = 0.0
        self._taken = 0  # all amounts ever taken, less those given back
        self._reported = (0, 0)  # held amount of the last report plus its grant; `_taken` at that report
        self._unmet = 0  # amount refused since the last report
        self._largest_unmet = 0  # largest refused request
        self._unmet_at = 0.0  # time of the last refusal
        self._least = 0  # ShareReport.least of the last report
        self._largest = 0  # largest request of about the last WINDOW_S
        self._largest_at = 0.0
        self._others_in_need = False
        self._yielded_at = 0.0
        self._gateways = 0  # number of gateways at the last report
        self._gather_until = 0.0
        self._short = 0  # ShareReport.most of the last report

    def set_limit(self, limit: int) -> None:
        """Changes the limit. If it shrinks, the held amount is void until Redis grants a new one."""
        if limit < self.limit:
            self.held = 0
            self._entitled = None
        self.dirty = self.dirty or limit != self.limit
        self.limit = limit

    # For requests

    def available(self, now: float, gateways: int) -> int:
        """Returns the amount that a request can take now."""
        return self.held if self.is_shared else max(0, self._ceiling(now, gateways) - self._own.used(now))

    def take(self, amount: int, now: float, gateways: int) -> bool:
        """Takes an amount for a request.

        Returns:
            False if the amount is not available. Nothing is taken then, and the next report requests the amount.
        """
        self.dirty = True
        if amount >= self._largest or now - self._largest_at > WINDOW_S:
            self._largest, self._largest_at = amount, now
        if amount > self.available(now, gateways):
            self._unmet = min(self._unmet + amount, self.limit)
            self._largest_unmet = min(max(self._largest_unmet, amount), self.limit)
            self._unmet_at = now
            return False
        self.use(amount, now)
        return True

    def use(self, amount: int, now: float) -> None:
        """Takes an amount that is used already, even if it is not available."""
        self.dirty = True
        self._taken += amount
        self.held = max(0, self.held - amount)
        self._own.add(amount, now)

    def give_back(self, amount: int, since: float, now: float) -> None:
        """Gives back an amount that was taken at `since` and is unused or no longer in use."""
        self.dirty = True
        given = self._own.give_back(amount, since, now)
        self._taken -= given
        if self.is_shared:
            self.held += given

    def settle(self, taken: int, used: int, since: float, now: float) -> None:
        """Corrects an amount that was taken at `since` to the amount that was used."""
        if used < taken:
            self.give_back(taken - used, since, now)
        elif used > taken:
            self.use(used - taken, now)

    # For headers and error messages

    def used(self, now: float) -> int:
        """Returns the used amount over all gateways, by the last reply of Redis."""
        return self._own.used(now) + self._others.used(now)

    def amounts(self, now: float) -> list[int]:
        """Returns the used amounts over all gateways by sub-bucket."""
        return [mine + theirs for mine, theirs in zip(self._own.amounts(now), self._others.amounts(now), strict=True)]

    def seconds_until(self, amount: int, now: float, gateways: int) -> float:
        """Returns the seconds until an amount may be available, if nothing is taken until then.

        0 for a limit of concurrent requests, whose end is unknown.
        """
        if self._own.size == 1:
            return 0.0
        amounts, most = self.amounts(now), self.limit
        if not self.is_shared:
            amounts, most = self._own.amounts(now), self._ceiling(now, gateways)
        return seconds_until(amounts, max(0, most - amount), now)

    # For the refill

    def gateway_joined(self) -> None:
        """Notes that a gateway has joined, which needs a part of the held amounts."""
        self.dirty = True

    @property
    def runs_low(self) -> bool:
        """Whether the share has refused a request, or has used more than half of the amount held at the last report."""
        return self._unmet > 0 or (self.is_shared and 2 * self.held < self._reported[0])

    def report(self, now: float, gateways: int) -> ShareReport:
        """Returns a report for Redis. If other gateways are in need, the held amount shrinks to a quarter of the recent use."""
        self.dirty = False
        least, unmet = self._largest_unmet, self._unmet
        most = 0
        if not self.is_shared:
            held = self.available(now, gateways)
        else:
            recent = self._own.recent(now) // 4
            if self._others_in_need and not unmet:
                self.held = min(self.held, recent)
                self._yielded_at = now
            else:
                target = self._target(recent, now, gateways)
                if gateways > self._gateways and not unmet:
                    self.held = min(self.held, target)
                most = max(self._unmet, target - self.held, 0)
            held = self.held
        if gateways > self._gateways:
            self._gather_until = now + GATHER_S
        self._gateways, self._short = gateways, most
        self._reported, self._least = (held, self._taken), least
        self._unmet = self._largest_unmet = 0
        return ShareReport(self.limit, least, most, held, unmet, self._own.amounts(now))

    def answered(self, answer: ShareReply, settled: bool, now: float) -> None:
        """Applies the reply to the last report.

        Args:
            settled: All gateways have had the time to report. Until then, nothing is granted.
        """
        held, taken = self._reported
        if settled and not self.is_shared:
            self.is_shared = True
            self.held = max(0, held - (self._taken - taken))
        if self.is_shared:
            self.held = max(0, self.held + answer.granted)
            self._reported = (held + answer.granted, taken)
            if self.held < self._least and now - self._unmet_at < PATIENCE_S:
                self._unmet = self._largest_unmet = self._least
        self._others_in_need = answer.in_need
        self._others.replace(answer.others, now)
        gathers = self._short > max(0, answer.granted) and now < self._gather_until
        self.dirty = self.dirty or not settled or answer.in_need or self._unmet > 0 or gathers

    def go_alone(self, now: float) -> None:
        """Continues without Redis."""
        if self.is_shared:
            self._entitled = self._own.used(now) + self.held
            self._alone_since = now
            self.is_shared = False
            self.held = 0
        self.dirty = True

    def _target(self, recent: int, now: float, gateways: int) -> int:
        """Returns the amount that should be held for coming requests."""
        reserve = self.limit if gateways == 1 else -(-self.limit // (2 * gateways))
        if now - self._yielded_at < YIELD_S:
            reserve = 0
        return max(reserve, recent, min(self._largest, self.limit))

    def _ceiling(self, now: float, gateways: int) -> int:
        part = max(1, self.limit // gateways)
        if self._entitled is None or now - self._alone_since >= ALONE_S:
            return part
        return min(part, self._entitled)

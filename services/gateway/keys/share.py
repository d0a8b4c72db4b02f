"""The share that one gateway has of one limit of an API key. Pure: the clock is an argument, in Unix seconds.

An amount is a number of requests or tokens. A share is in one of two modes:

- Shared. Each gateway reports two amounts to Redis: the amount that it has used, and the held amount, which is granted to it
  but not used yet. Redis grants only amounts that no gateway has used or holds, so all gateways together stay within the limit.
  A request takes from the held amount without a round trip to Redis.
- Alone, before the first reply of Redis and while Redis is unreachable. The gateway may use its part: the limit divided by the
  last known number of gateways. For ALONE_S after the loss of Redis, the part is at most the sum of the gateway's used and
  held amounts at the loss. The amounts that other gateways used before the loss still count in this time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rootstock_llm.services.gateway.keys.usage import BUCKET_S, WINDOW_S, Usage, seconds_until

ALONE_S = WINDOW_S + 2 * BUCKET_S  # seconds for which amounts used before the loss of the connection to Redis may still count
YIELD_S = 6.0  # seconds for which a share requests no reserve after it has given up held amounts for other gateways
PATIENCE_S = 5.0  # seconds after a refusal for which reports request the amount of the refused request
GATHER_S = 5.0  # seconds for which a share that is too small keeps requesting after a gateway has joined


@dataclass(frozen=True, slots=True)
class ShareReport:
    """A gateway's report on its share of one limit, with the amounts that it requests."""

    limit: int  # limit for all gateways together; 0 if the API key has no limit of this kind
    least: int  # amount that a refused request needs; it is granted completely if it is free
    most: int  # amount for coming requests; at most half of the free amount is granted for it
    held: int  # unused amount that the gateway holds
    unmet: int  # total amount of the requests that the gateway has refused since its last report
    amounts: Sequence[int]  # amounts that the gateway has used, as in Usage.amounts()


@dataclass(frozen=True, slots=True)
class ShareReply:
    """The reply to a ShareReport."""

    granted: int  # change of the held amount; negative if the gateways use and hold more than the limit together
    in_need: bool  # whether another gateway was not granted an amount that it needs
    others: Sequence[int]  # amounts used by the other gateways, as in Usage.amounts()


class Share:
    """The share that this gateway has of one limit of an API key. Used only on the event loop."""

    def __init__(self, limit: int, own: Usage, others: Usage) -> None:
        self.limit = limit  # for all gateways together
        self.dirty = True  # whether the next exchange with Redis must report the share
        self.held = 0  # granted amount that is not used yet; 0 in the alone mode
        self.is_shared = False  # whether the mode is Shared
        self._own = own  # amounts that this gateway has used
        self._others = others  # amounts that other gateways have used, by the last reply
        # Used and held amount when Redis was lost, or None if the share was never in the shared mode.
        self._amount_at_loss: int | None = None
        self._alone_since = 0.0  # time at which Redis was lost
        self._taken = 0  # total of all taken amounts minus the amounts given back
        self._reported = (0, 0)  # held amount of the last report plus its grant; `_taken` at that report
        self._unmet = 0  # total amount of the requests refused since the last report
        self._largest_unmet = 0  # amount of the largest request refused since the last report
        self._unmet_at = 0.0  # time of the last refusal
        self._least = 0  # ShareReport.least of the last report
        self._largest = 0  # amount of the largest request within about the last WINDOW_S
        self._largest_at = 0.0  # time of that request
        self._others_in_need = False  # ShareReply.in_need of the last reply
        self._yielded_at = 0.0  # time at which the share last gave up held amounts for other gateways
        self._gateways = 0  # number of gateways at the last report
        self._gather_until = 0.0  # time until which the share requests more after a gateway has joined
        self._requested_reserve = 0  # ShareReport.most of the last report

    def set_limit(self, limit: int) -> None:
        """Changes the limit. If the new limit is smaller, the held amount becomes 0 until Redis grants a new one."""
        if limit < self.limit:
            self.held = 0
            self._amount_at_loss = None
        self.dirty = self.dirty or limit != self.limit
        self.limit = limit

    # Methods for requests.

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
        """Takes an amount that a request has already used, even if it is not available."""
        self.dirty = True
        self._taken += amount
        self.held = max(0, self.held - amount)
        self._own.add(amount, now)

    def give_back(self, amount: int, since: float, now: float) -> None:
        """Gives back an amount that was taken at `since`, because the request did not use it or has ended."""
        self.dirty = True
        given = self._own.give_back(amount, since, now)
        self._taken -= given
        if self.is_shared:
            self.held += given

    def settle(self, taken: int, used: int, since: float, now: float) -> None:
        """Corrects an amount that was taken at `since` to the amount that the request has used."""
        if used < taken:
            self.give_back(taken - used, since, now)
        elif used > taken:
            self.use(used - taken, now)

    # Methods for headers and error messages.

    def used(self, now: float) -> int:
        """Returns the amount that all gateways have used, by the last reply of Redis."""
        return self._own.used(now) + self._others.used(now)

    def amounts(self, now: float) -> list[int]:
        """Returns the amounts that all gateways have used, by sub-bucket."""
        return [mine + theirs for mine, theirs in zip(self._own.amounts(now), self._others.amounts(now), strict=True)]

    def seconds_until(self, amount: int, now: float, gateways: int) -> float:
        """Returns the seconds until `amount` may be available, if no other request takes an amount before then.

        0 for a limit of concurrent requests, because the end of a request is unknown.
        """
        if self._own.size == 1:
            return 0.0
        amounts, most = self.amounts(now), self.limit
        if not self.is_shared:
            amounts, most = self._own.amounts(now), self._ceiling(now, gateways)
        return seconds_until(amounts, max(0, most - amount), now)

    # Methods for ShareRefill.

    def gateway_joined(self) -> None:
        """Makes the next exchange with Redis report the share, because a new gateway needs a part of the held amounts."""
        self.dirty = True

    @property
    def runs_low(self) -> bool:
        """Whether the share has refused a request, or has used more than half of the amount held at the last report."""
        return self._unmet > 0 or (self.is_shared and 2 * self.held < self._reported[0])

    def report(self, now: float, gateways: int) -> ShareReport:
        """Returns the report for Redis.

        If other gateways are in need and this gateway has refused no request since its last report, the held amount shrinks to
        at most a quarter of the recently used amount.
        """
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
        self._gateways, self._requested_reserve = gateways, most
        self._reported, self._least = (held, self._taken), least
        self._unmet = self._largest_unmet = 0
        return ShareReport(self.limit, least, most, held, unmet, self._own.amounts(now))

    def answered(self, answer: ShareReply, settled: bool, now: float) -> None:
        """Applies the reply to the last report.

        Args:
            settled: Whether all gateways have had time to report. Until then, Redis grants nothing.
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
        gathers = self._requested_reserve > max(0, answer.granted) and now < self._gather_until
        self.dirty = self.dirty or not settled or answer.in_need or self._unmet > 0 or gathers

    def go_alone(self, now: float) -> None:
        """Changes to the alone mode, because Redis is unreachable."""
        if self.is_shared:
            self._amount_at_loss = self._own.used(now) + self.held
            self._alone_since = now
            self.is_shared = False
            self.held = 0
        self.dirty = True

    def _target(self, recent: int, now: float, gateways: int) -> int:
        """Returns the amount that this gateway should hold for coming requests."""
        reserve = self.limit if gateways == 1 else -(-self.limit // (2 * gateways))
        if now - self._yielded_at < YIELD_S:
            reserve = 0
        return max(reserve, recent, min(self._largest, self.limit))

    def _ceiling(self, now: float, gateways: int) -> int:
        """Returns the amount that this gateway may use in the alone mode."""
        part = max(1, self.limit // gateways)
        if self._amount_at_loss is None or now - self._alone_since >= ALONE_S:
            return part
        return min(part, self._amount_at_loss)

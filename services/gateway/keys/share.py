"""One gateway's part of one limit of a key. Pure: the clock is an argument (Unix seconds), and nothing is awaited.

Together: gateways say in Redis what they have used of a limit and what they hold of it beyond that, unused. Only what nobody has
used or holds is granted, so whatever is taken from `held` keeps all of them within the limit, and no request asks anybody.

Alone (Redis is away, or has not been asked): what this gateway had used or held then is its own, up to the limit divided by the
gateways last seen; and after ALONE_S, when nothing of before counts any more, that part is, whatever it had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.keys.rate_window import BUCKET_S, WINDOW_S, seconds_until
from services.gateway.keys.usage import Usage

ALONE_S = WINDOW_S + 2 * BUCKET_S
YIELD_S = 6.0  # for which what others needed is left to them
PATIENCE_S = 5.0  # for which what was refused is asked for
GATHER_S = 5.0  # after a gateway has come, for which the others' parts are asked for what they do not need


@dataclass(frozen=True, slots=True)
class Report:
    """What a gateway says of its share. unmet: amounts that it had to refuse since its last report. It asks for `most`, and at
    least `least` if that much is free."""

    limit: int
    least: int
    most: int
    held: int
    unmet: int
    amounts: Sequence[int]


@dataclass(frozen=True, slots=True)
class Answer:
    """granted: more to hold, or less where there was no room for it: of a gateway that has just come. in_need: others could not
    be granted what they asked for. others: what other gateways have used."""

    granted: int
    in_need: bool
    others: Sequence[int]


class Share:
    """limit: over all gateways. dirty: something is to be reported."""

    def __init__(self, limit: int, own: Usage, others: Usage) -> None:
        self.limit = limit
        self.dirty = True
        self.held = 0  # while it is shared
        self.is_shared = False
        self._own = own
        self._others = others  # as last heard
        self._entitled: int | None = None
        self._alone_since = 0.0
        self._taken = 0  # ever, less what came back
        self._reported = (0, 0)  # held, and taken by then
        self._unmet = 0
        self._largest_unmet = 0
        self._unmet_at = 0.0
        self._least = 0  # as it was last asked for
        self._largest = 0
        self._largest_at = 0.0
        self._others_in_need = False
        self._yielded_at = 0.0
        self._gateways = 0  # at the last report
        self._gather_until = 0.0
        self._short = 0

    def set_limit(self, limit: int) -> None:
        """Of a smaller one nothing is held yet."""
        if limit < self.limit:
            self.held = 0
            self._entitled = None
        self.dirty = self.dirty or limit != self.limit
        self.limit = limit

    # For requests

    def available(self, now: float, gateways: int) -> int:
        """How much can be taken here and now."""
        return self.held if self.is_shared else max(0, self._ceiling(now, gateways) - self._own.used(now))

    def take(self, amount: int, now: float, gateways: int) -> bool:
        """False: there is not so much at hand; nothing is taken, and it will be asked for."""
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
        """Without being asked."""
        self.dirty = True
        self._taken += amount
        self.held = max(0, self.held - amount)
        self._own.add(amount, now)

    def give_back(self, amount: int, since: float, now: float) -> None:
        """What was taken then and not used after all, or not any more."""
        self.dirty = True
        given = self._own.give_back(amount, since, now)
        self._taken -= given
        if self.is_shared:
            self.held += given

    def settle(self, taken: int, used: int, since: float, now: float) -> None:
        """What was taken at `since` has come to so much."""
        if used < taken:
            self.give_back(taken - used, since, now)
        elif used > taken:
            self.use(used - taken, now)

    # For whoever asks how it stands

    def used(self, now: float) -> int:
        """Of the limit, over all gateways, as far as is known."""
        return self._own.used(now) + self._others.used(now)

    def amounts(self, now: float) -> list[int]:
        """The same by sub-bucket."""
        return [mine + theirs for mine, theirs in zip(self._own.amounts(now), self._others.amounts(now), strict=True)]

    def seconds_until(self, amount: int, now: float, gateways: int) -> float:
        """After which so much may be at hand, if nobody takes anything until then; 0 where only time tells."""
        if self._own.size == 1:
            return 0.0
        amounts, most = self.amounts(now), self.limit
        if not self.is_shared:
            amounts, most = self._own.amounts(now), self._ceiling(now, gateways)
        return seconds_until(amounts, max(0, most - amount), now)

    # For the refill

    def someone_came(self) -> None:
        """What is held is to be held by one more."""
        self.dirty = True

    @property
    def runs_low(self) -> bool:
        """It has refused something, or more is being used than is at hand."""
        return self._unmet > 0 or (self.is_shared and 2 * self.held < self._reported[0])

    def report(self, now: float, gateways: int) -> Report:
        """Of now. What is not needed while others are in need is not held any more from here on."""
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
        return Report(self.limit, least, most, held, unmet, self._own.amounts(now))

    def answered(self, answer: Answer, settled: bool, now: float) -> None:
        """settled: all gateways have had the time to report; until then nothing is granted."""
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
        """Redis is away."""
        if self.is_shared:
            self._entitled = self._own.used(now) + self.held
            self._alone_since = now
            self.is_shared = False
            self.held = 0
        self.dirty = True

    def _target(self, recent: int, now: float, gateways: int) -> int:
        """What should be at hand for what comes next."""
        standing = self.limit if gateways == 1 else -(-self.limit // (2 * gateways))
        if now - self._yielded_at < YIELD_S:
            standing = 0
        return max(standing, recent, min(self._largest, self.limit))

    def _ceiling(self, now: float, gateways: int) -> int:
        part = max(1, self.limit // gateways)
        if self._entitled is None or now - self._alone_since >= ALONE_S:
            return part
        return min(part, self._entitled)

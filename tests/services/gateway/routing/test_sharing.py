"""When a new prefix is placed where other gateways would place it too."""

from __future__ import annotations

from services.gateway.routing.sharing import SharingMeter


def test_sharing_is_taken_for_granted_until_it_has_long_not_been_seen() -> None:
    meter = SharingMeter()
    unseen = 0
    while meter.seen:
        meter.decided(False)
        unseen += 1
    assert 32 < unseen < 128


def test_one_match_in_five_is_sharing_and_one_in_fifty_is_not() -> None:
    for every, seen in ((5, True), (50, False)):
        meter = SharingMeter()
        for number in range(1000):
            meter.decided(number % every == 0)
        assert meter.seen is seen

"""Tests of the sharing meter, which decides whether gateways place a new prefix on the same worker."""

from __future__ import annotations

from rootstock_llm.services.gateway.routing.policies import SharingMeter


def test_sharing_meter_assumes_shared_prefixes_at_first() -> None:
    meter = SharingMeter()
    unseen = 0
    while meter.is_shared:
        meter.decided(False)
        unseen += 1
    assert 32 < unseen < 128


def test_sharing_meter_reports_shared_prefixes_when_one_prompt_in_five_matches() -> None:
    for every, seen in ((5, True), (50, False)):
        meter = SharingMeter()
        for number in range(1000):
            meter.decided(number % every == 0)
        assert meter.is_shared is seen

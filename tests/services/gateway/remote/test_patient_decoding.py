"""Tests that a whole response is decoded in few messages, and that its tokens are timed on arrival."""

from __future__ import annotations

import pytest

from rootstock_llm.services.gateway.generation.decoding import PATIENT_IDS
from tests.services.gateway.system import System

TOKENS = 2 * PATIENT_IDS + 10


@pytest.mark.parametrize(("stream", "max_messages"), [(False, 3), (True, TOKENS)], ids=["whole", "stream"])
def test_decoding_takes_few_messages_when_the_response_is_not_streamed(stream: bool, max_messages: int) -> None:
    text = "ab" * PATIENT_IDS + "c" * 20
    with System(configure=lambda workers: setattr(workers[0], "answer", lambda submit: text)) as system:
        answer = system.chat(stream=stream, max_tokens=TOKENS, ignore_eos=True)
        assert answer.status_code == 200
        batches = [batch for batch in system.detokenizer.batches if batch.handles]
        assert sum(sum(batch.counts) for batch in batches) == TOKENS
        assert len(batches) <= max_messages and (not stream or len(batches) > 3)
        if not stream:
            assert answer.json()["choices"][0]["message"]["content"] == text[:TOKENS]
        assert system.metric("rootstock_gateway_time_to_first_token_seconds_count") == 1
        assert system.metric("rootstock_gateway_inter_token_latency_seconds_count") == TOKENS - 1

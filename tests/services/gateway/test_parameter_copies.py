"""Tests that sampling parameters are copied once per submit, from the message in GenerationParams."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest

import rootstock_llm.services.gateway
from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.protos import worker_pb2
from rootstock_llm.services.gateway.dispatch.placement import Placement
from rootstock_llm.services.gateway.generation.request import GenerationParams, ModelInfo, PromptInput
from rootstock_llm.services.shared.sampling_parameters import SamplingDefaults
from tests.services.gateway.dispatch.test_dispatch_hedging import hedged
from tests.services.gateway.dispatch.test_dispatch_lost import begun, stopped
from tests.services.gateway.dispatch.test_faults import Pending
from tests.services.gateway.system import System, wait_until

GATEWAY = Path(rootstock_llm.services.gateway.__file__).parent
# Methods of protobuf messages that copy data into the message
COPIES = ("CopyFrom", "MergeFrom", "MergeFromString", "ParseFromString")


@contextmanager
def count_copies(system: System) -> Iterator[Counter[str]]:
    """Counts the calls on the gateway's event loop that copy data into a SamplingParams message.

    Yields:
        Number of calls of each method in COPIES, by its name.
    """
    copies: Counter[str] = Counter()

    def watch(_frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and isinstance(getattr(called, "__self__", None), pb.SamplingParams):
            copies[called.__name__] += called.__name__ in COPIES

    system.do(lambda: sys.setprofile(watch))
    try:
        yield copies
    finally:
        system.do(lambda: sys.setprofile(None))


def parameters(system: System) -> list[pb.SamplingParams]:
    return [submit.sampling for host in system.workers for submit in host.servicer.submits]


@pytest.mark.parametrize("n", [1, 3])
def test_parameters_are_copied_once_for_each_choice(shared: System, n: int) -> None:
    with count_copies(shared) as copies:
        answer = shared.chat(n=n, temperature=0.5, seed=7, stop=["zzz"], max_tokens=4)
    assert answer.status_code == 200 and copies["CopyFrom"] == n
    sent = [submit.sampling for submit in shared.worker.submits[-n:]]
    assert sorted(params.seed for params in sent) == list(range(7, 7 + n))
    assert all((params.temperature, list(params.stop), params.max_new_tokens) == (0.5, ["zzz"], 4) for params in sent)


def test_parameters_are_copied_again_for_a_replay() -> None:
    with System(workers=2, configure=stopped) as system, count_copies(system) as copies:
        pending = Pending(system, temperature=1.0)
        first = begun(system, 3)
        assert copies["CopyFrom"] == 1
        system.call(first.stop())
        system.allow(None)
        assert pending.result().status_code == 200
        before, after = parameters(system)
        assert copies["CopyFrom"] == 2 and before == after and before.HasField("seed")


def test_parameters_are_copied_again_for_a_hedge() -> None:
    with System(workers=2, configure=stopped, hedge_after_s=0.1) as system, count_copies(system) as copies:
        pending = Pending(system)
        hedged(system)
        wait_until(lambda: copies["CopyFrom"] == 2, "the copied parameters of the hedge")
        system.allow(None)
        assert pending.result().status_code == 200 and copies["CopyFrom"] == 2


def test_count_copies_counts_one_copy(shared: System) -> None:
    with count_copies(shared) as copies:
        shared.do(lambda: pb.SamplingParams().CopyFrom(pb.SamplingParams(top_k=3)))
    assert copies["CopyFrom"] == 1


def params_of(**fields: Any) -> GenerationParams:
    given: dict[str, Any] = {
        "stream": False,
        "include_usage": False,
        "n": 2,
        "seed": None,
        "max_tokens": 3,
        "sampling": pb.SamplingParams(temperature=0.5, logit_bias_ids=[1], logit_bias_values=[2.0]),
        "stop_token_ids": frozenset(),
        "skip_special_tokens": True,
        "include_stop": False,
        "cache_salt": "",
        "priority": 0,
    }
    return GenerationParams(**(given | fields))


def test_each_choice_has_a_separate_seed() -> None:
    model = ModelInfo("m", 100, 50)
    first, second = (params_of().seed_of(number, model) for number in range(2))
    assert first is not None and second is not None and first != second
    assert [params_of(seed=2**64 - 1).seed_of(number, model) for number in range(2)] == [2**64 - 1, 0]
    assert params_of(sampling=pb.SamplingParams(temperature=0.0)).seed_of(0, model) is None
    assert params_of(sampling=pb.SamplingParams(embedding=pb.Embedding())).seed_of(0, model) is None


def test_parameters_sent_to_a_worker_have_the_grammar_and_limit_and_defaults_and_seed() -> None:
    params = params_of(grammar=pb.Grammar(json_object=True))
    model = ModelInfo("m", 100, 50, defaults=SamplingDefaults(top_p=0.25))
    choice = SimpleNamespace(params=params, seed=7, prompt=PromptInput([1] * 98, None))
    placement = Placement(cast(Any, SimpleNamespace(model=model)), cast(Any, choice), cast(Any, None))
    written = pb.SamplingParams()
    placement.write_sampling(written, ends_with_prompt=True)
    assert (written.grammar.json_object, written.max_new_tokens, written.top_p, written.seed) == (True, 2, 0.25, 7)
    assert list(written.logit_bias_ids) == [1] and written.temperature == 0.5
    asked = params.sampling
    assert not (asked.HasField("grammar") or asked.HasField("seed") or asked.HasField("top_p")), (
        "the message is shared by all choices"
    )


def test_gateway_code_does_not_copy_parameters_by_constructors() -> None:
    """count_copies() does not see copies by constructors, so this test searches the code for them."""
    calls = [
        node for path in GATEWAY.rglob("*.py") for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
    ]
    submits = [call for call in calls if ast.unparse(call.func).endswith(worker_pb2.Submit.DESCRIPTOR.name)]
    assert submits and not any(keyword.arg in (None, "sampling") for call in submits for keyword in call.keywords)
    writers = [call for call in calls if ast.unparse(call.func) == "into.CopyFrom"]
    assert len(writers) == 1


def test_gateway_code_does_not_write_into_the_messages_of_generation_params() -> None:
    """Protobuf cannot freeze the messages in the frozen GenerationParams, so this test searches the code for writes."""
    writes = re.compile(
        r"\b(params|generation|asked)\.(sampling|grammar)\.(\w+\.)*(CopyFrom|MergeFrom|Clear\w*|add|append|extend)\("
    )
    stores = re.compile(r"\b(params|generation|asked)\.(sampling|grammar)\.[\w.]+ \+?= ")
    for path in GATEWAY.rglob("*.py"):
        text = path.read_text()
        assert not writes.search(text) and not stores.search(text), path

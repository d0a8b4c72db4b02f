"""Tests that keys of other charts are refused with advice (charts/rootstock/files/foreign-keys.yaml)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from zlib import crc32

import yaml

from charts.rootstock.values_schema import FOREIGN, foreign_keys
from tests.chart.release import CHART, merged, refusal
from tests.chart.variants import model
from tests.night import NIGHTLY

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
ONE_IN = 1 if NIGHTLY else 10  # one in this many rows of foreign-keys.yaml is tested, and always the rows of all keys in USUAL
# Frequent keys of vLLM's chart, its production stack, KServe and Helm's starter chart.
USUAL = [
    "imagePullSecrets",
    "replicaCount",
    "resources",
    "autoscaling.minReplicas",
    "autoscaling.enabled",
    "image.repository",
    "image.command",
    "containerPort",
    "deploymentStrategy",
    "extraContainers",
    "extraInit",
    "gpuModels",
    "livenessProbe",
    "maxUnavailablePodDisruptionBudget",
    "servicePort",
    "env",
    "servingEngineSpec.modelSpec",
    "servingEngineSpec.runtimeClassName",
    "servingEngineSpec.vllmApiKey",
    "routerSpec.replicaCount",
    "routerSpec.routingLogic",
    "cacheserverSpec",
    "loraAdapters",
    "sharedStorage",
    "predictor",
    "storageUri",
    "model",
    "nodeSelector",
    "tolerations",
    "affinity",
    "podAnnotations",
    "securityContext",
    "service.port",
    "serviceMonitor",
    "persistence",
    "volumes",
    "worker.replicaCount",
    "worker.settings.tensor_parallel_size",
    "worker.settings.gpu_memory_utilization",
    "worker.settings.max_num_seqs",
    "worker.settings.max_model_len",
    "gateway.image.pullPolicy",
    "worker.env",
    "models.modelURL",
]


def rows(block: dict[str, Any], way: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    for key, row in block.items():
        if isinstance(row, dict):
            yield from rows(row, (*way, key))
        else:
            yield (way, row) if key == "" else ((*way, key), row)


ROWS = dict(rows(foreign_keys()))


def values_with(way: tuple[str, ...]) -> dict[str, Any]:
    """Returns values that set this key to an object."""
    value: Any = {"anything": 1}
    for key in reversed(way):
        value = [model(**value)] if key == "models" else {key: value}
        value = {key: value} if key == "models" else value
    return dict(value)


def test_key_of_another_chart_is_refused_with_the_key_to_use() -> None:
    chosen = [way for way in ROWS if ".".join(way) in USUAL or crc32(".".join(way).encode()) % ONE_IN == 0]
    expected = {way: f"is not a key of this chart: {ROWS[way]}." for way in chosen}
    messages = {way: refusal(values_with(way)) for way in chosen}
    assert {way: message for way, message in messages.items() if expected[way] not in message} == {}


def test_usual_keys_of_other_charts_have_advice() -> None:
    assert [key for key in USUAL if tuple(key.split(".")) not in ROWS] == [] and len(USUAL) >= 30


def test_empty_key_of_another_chart_is_refused() -> None:
    assert "replicaCount is not a key of this chart: use replicas" in refusal({"replicaCount": None})


def test_error_for_a_key_of_another_chart_in_a_model_has_the_list_index() -> None:
    message = refusal({"models": [model("a"), model("b", worker={"prefill": {"settings": {"max_num_seqs": 4}}})]})
    assert "models[1].worker.prefill.settings.max_num_seqs is not a key of this chart: use max_running_requests." in message


def test_advice_mentions_only_existing_keys() -> None:
    settings = {key for block in ("workerSettings",) for key in SCHEMA["$defs"][block]["properties"]}
    settings |= {
        key for each in ("gateway", "tokenizer") for key in SCHEMA["$defs"][each]["properties"]["settings"]["properties"]
    }
    wrong: dict[str, str] = {}
    for way, sentence in ROWS.items():
        assert sentence.startswith("use ") and not sentence.endswith("."), way
        for named in re.findall(r"\b[a-zA-Z]+(?:\[\])?(?:\.[a-zA-Z_0-9]+)+", re.sub(r"docs/\S+", "", sentence)):
            if not exists(named):
                wrong[".".join(way)] = named
        for word in re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", sentence):
            if word not in settings:
                wrong[".".join(way)] = word
    assert wrong == {}


def exists(path: str) -> bool:
    """Returns whether the chart's schema has the key."""
    found: Any = SCHEMA
    for key in path.replace("[]", "").split("."):
        found = SCHEMA["$defs"][found["$ref"].rpartition("/")[2]] if "$ref" in found else found
        found = found.get("items", found)
        found = SCHEMA["$defs"][found["$ref"].rpartition("/")[2]] if "$ref" in found else found
        if found.get("properties", {}).get(key, {FOREIGN: True}).get(FOREIGN):
            return False
        found = found["properties"][key]
    return True


def test_schema_refuses_unknown_keys_that_have_no_advice() -> None:
    for values in ({"replicaCounts": 1}, {"worker": {"settings": {"nope": 1}}}, {"models": [model(worker={"nope": 1})]}):
        assert "additional properties" in refusal(merged(VALUES, values) if "models" not in values else values)

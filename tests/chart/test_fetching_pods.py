"""Tests pods that download their model: runs their exact commands as processes, with a model hub on loopback."""

from __future__ import annotations

import json
from pathlib import Path

from tests.chart.kubelet import Machine
from tests.chart.pods import pod
from tests.chart.release import REPO, merged, render
from tests.chart.variants import VARIANTS
from tests.services.shared.stores import Hub, serve
from tests.services.tokenizer.model_folders import sentencepiece_model

DEMO = REPO / "models" / "demo"
WEIGHTS = ".safetensors"
START_S = 120.0


def test_tokenizer_downloads_small_files_and_worker_downloads_all(tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in DEMO.iterdir() if path.suffix in (".json", ".jinja", WEIGHTS)}
    with serve(Hub({"main": ("c1", files)}, "secret")) as hub:
        url = hub.url.replace("127.0.0.1", "localhost")  # Machine treats names with dots as Services
        worker = {"gpus": 0, "kind": "Deployment", "cacheSize": 0, "cacheVolume": {"emptyDir": {}}}
        cache = {"modelCache": {"prefetch": {"hubEndpoint": url, "tokenSecret": "hub"}}, "worker": worker}
        machine = Machine(render(merged(VARIANTS["fetched-by-pods"], cache)), tmp_path, {"hub": {"token": "secret"}})
        for component in ("tokenizer", "worker"):
            each = pod(machine.release, component)
            (first,) = each.spec["initContainers"]
            fetching = machine.start(each, first)
            assert fetching.status_of_exit(START_S) == 0, fetching.text()
    found = {
        component: {path.name for path in (tmp_path / component / folder / "demo").iterdir()} - {".source"}
        for component, folder in (("tokenizer", "models"), ("worker", "cache"))
    }
    small = {name for name in files if not name.endswith(WEIGHTS)}
    assert found == {"tokenizer": small, "worker": set(files)} and small != set(files)
    tokenizer = pod(machine.release, "tokenizer")
    running = machine.start(tokenizer, tokenizer.container())
    try:
        running.wait_for("startupProbe", START_S)
        running.wait_for("readinessProbe", START_S)
    finally:
        running.kill()


def test_tokenizer_pod_converts_a_downloaded_tokenizer(tmp_path: Path) -> None:
    model = sentencepiece_model(tmp_path / "tokenizer.model")
    config = json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    files = {"tokenizer.model": (model / "tokenizer.model").read_bytes(), "config.json": config.encode()}
    with serve(Hub({"main": ("c1", files)})) as hub:
        url = hub.url.replace("127.0.0.1", "localhost")
        prefetch = {"hubEndpoint": url, "image": {"repository": "rootstock/worker"}}
        values = merged(VARIANTS["fetched-by-pods"], {"modelCache": {"prefetch": prefetch}})
        machine = Machine(render(values), tmp_path / "pods")
        tokenizer = pod(machine.release, "tokenizer")
        (first,) = tokenizer.spec["initContainers"]
        fetching = machine.start(tokenizer, first)
        assert fetching.status_of_exit(START_S) == 0, fetching.text()
    assert (tmp_path / "pods" / "tokenizer" / "models" / "demo" / "tokenizer.json").is_file()

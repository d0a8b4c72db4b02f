"""Tests that the chart computes KV memory like the worker, for every row of sizing.md and every ci file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from rootstock_llm.services.worker.core.contracts.pool_sizes import CacheShape, PoolTooSmall
from rootstock_llm.services.worker.exec.sizing import DeviceMemoryUse, fitting_sizes
from rootstock_llm.services.worker.settings import WorkerSettings
from tests.chart.pods import pods
from tests.chart.release import CHART, REPO, ci_names, ci_values, merged, refusal, render
from tests.chart.variants import GPU_RESOURCES, model

PAGE = (REPO / "docs/how-to/kubernetes/sizing.md").read_text()
SIZES: dict[str, dict[str, float]] = yaml.safe_load((CHART / "files/model-sizes.yaml").read_text())
RESERVE = 512 << 20  # bytes of a GPU that stay free; copied from services/worker/exec/sizing.py, which imports torch
REST = 3_000_000_000  # bytes for activations, graphs and workspaces that sizing.md assumes
GPU_FRACTION = 0.9  # default of mem_fraction_static
MEMORIES = (24, 80, 141)  # GB, the columns of sizing.md
GB = 1_000_000_000


@dataclass(frozen=True)
class Row:
    """A model's row in the table of sizing.md."""

    name: str
    layers: int
    heads: int
    head_size: int
    kv_kib: float
    weights_gb: float
    cells: tuple[int | None, ...]  # thousands of tokens, by MEMORIES; None if no page fits


def table(columns: int) -> list[list[str]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]
    return [cells for cells in lines if len(cells) == columns]


def sizing_rows() -> list[Row]:
    found = []
    for name, layers, heads_and_size, kib, weights, *pools in table(8):
        if not re.fullmatch(r"\d+ × \d+", heads_and_size) or "" in pools:
            continue
        heads, size = map(int, heads_and_size.split(" × "))
        cells = tuple(None if cell == "–" else int(cell.replace(",", "")) for cell in pools)
        found.append(Row(name, int(layers), heads, size, float(kib), float(weights), cells))
    return found


def context_lens() -> dict[str, tuple[int, dict[int, int]]]:
    """Returns the context lengths of sizing.md by model: the model's own length, and shorter lengths by GPU memory in GB.

    A GPU memory is listed only if the model's own length does not fit. Its value is the largest length that fits.
    """
    found: dict[str, tuple[int, dict[int, int]]] = {}
    for names, context, needed in table(3):
        if re.fullmatch(r"[\d,]+", context):
            most = {int(gb): int(tokens.replace(",", "")) for gb, tokens in re.findall(r"(\d+) GB: ([\d,]+)", needed)}
            found |= {name: (int(context.replace(",", "")), most) for name in names.split(", ")}
    return found


ROWS = sizing_rows()
CASES = [(row, gb) for row in ROWS for gb in MEMORIES]


def worker_pages(size: dict[str, float], gpu_gb: float, settings: dict[str, Any]) -> int:
    """Returns the number of KV pages that the worker computes for its pool. Raises PoolTooSmall."""
    total = round(gpu_gb * GB)
    use = DeviceMemoryUse(total, total, round(size["weightsGB"] * GB), REST, 0, 0, allocated_now=())
    loaded = WorkerSettings.model_validate({"model": "m", **settings})
    page_bytes = round(size["kvKiBPerToken"] * 1024) * loaded.page_size
    fraction = loaded.mem_fraction_static or GPU_FRACTION
    caches, context_len = CacheShape(page_bytes=page_bytes), loaded.context_len or loaded.page_size
    return fitting_sizes(use, fraction, caches, loaded.page_size, context_len, RESERVE).pages


def values_for(source: str, gpu_gb: float, **settings: Any) -> dict[str, Any]:
    over = {"gpus": 1, "gpuMemoryGB": gpu_gb, "resources": GPU_RESOURCES, "settings": settings, "cacheVolume": {"emptyDir": {}}}
    return {"modelCache": {"type": "pod"}, "models": [model(path="/models/a", source=source)], "worker": over}


def noted_contexts(notes: str) -> list[int]:
    return [int(found) for found in re.findall(r", context (\d+) tokens", notes)]


def test_sizing_page_has_all_rows() -> None:
    assert [row.name for row in ROWS][:2] == ["Qwen3-0.6B", "Qwen3-4B"] and len(ROWS) >= 10


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_sizing_row_equals_the_charts_sizes(row: Row) -> None:
    size = SIZES[row.name.lower().replace(" ", "-")]
    assert (size["weightsGB"], size["kvKiBPerToken"]) == (row.weights_gb, row.kv_kib)
    assert row.kv_kib * 1024 == 2 * row.layers * row.heads * row.head_size * 2


@pytest.mark.parametrize(("row", "gpu_gb"), CASES, ids=[f"{row.name} at {gb} GB" for row, gb in CASES])
def test_chart_computes_the_same_context_length_as_the_worker(row: Row, gpu_gb: int) -> None:
    name = row.name.lower().replace(" ", "-")
    size, cell = SIZES[name], row.cells[MEMORIES.index(gpu_gb)]
    values = values_for(f"org/{name}@main", gpu_gb)
    try:
        tokens = worker_pages(size, gpu_gb, {}) * 16
    except PoolTooSmall:
        assert cell is None and "no page of KV fits on a GPU" in refusal(values)
        return
    assert refusal(values) == ""
    assert cell is not None and abs(tokens / 1000 - cell) <= max(1, cell / 500)
    context, most = context_lens()[row.name]
    assert context == size["contextLen"] and noted_contexts(render(values).notes) == [min(tokens, context)]
    assert most.get(gpu_gb) == (tokens if tokens < context else None)


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("settings", [{}, {"mem_fraction_static": 0.88}, {"page_size": 64}], ids=["default", "share", "page"])
def test_chart_accepts_context_len_up_to_the_kv_pool(settings: dict[str, Any], more: int) -> None:
    size = SIZES["qwen3-32b"]
    held = worker_pages(size, 80, settings) * settings.get("page_size", 16)
    asked = {**settings, "context_len": held + more}
    message = refusal(values_for("Qwen/Qwen3-32B", 80, **asked))
    if more:
        assert f"settings.context_len is {held + 1}, and the KV pool of a GPU of 80 GB (gpuMemoryGB) has {held} tokens" in message
        with pytest.raises(PoolTooSmall):
            worker_pages(size, 80, asked)
    else:
        assert message == "" and worker_pages(size, 80, asked)


def test_release_notes_mention_a_kv_pool_that_limits_the_context() -> None:
    assert worker_pages(SIZES["qwen3-32b"], 80, {"mem_fraction_static": 0.88}) * 16 == 7232
    notes = render(values_for("Qwen/Qwen3-32B", 80, mem_fraction_static=0.88)).notes
    assert "context 7232 tokens of the model's 40960: the KV pool holds no more" in notes


@pytest.mark.parametrize("name", [name for name in ci_names() if name != "defaults"])
def test_gpu_workers_of_ci_values_files_have_a_kv_pool_for_the_whole_context(name: str) -> None:
    values = ci_values(name)
    found = []
    for entry in values.get("models", []):
        over = merged(values.get("worker", {}), entry.get("worker", {}))
        if not (over.get("gpus") or over.get("resourceClaims")):
            continue
        size = {**SIZES.get(entry.get("source", "").partition("@")[0].rpartition("/")[2].lower(), {}), **entry.get("size", {})}
        pools = [over.get("settings", {})]
        if prefill := over.get("prefill"):
            pools.append(merged(over.get("settings", {}), prefill.get("settings", {})))
        for settings in pools:
            known = {key: value for key, value in settings.items() if not key.startswith("hicache")}
            tokens = worker_pages(size, over["gpuMemoryGB"], known) * 16
            assert tokens >= size["contextLen"], f"{entry['name']}: a pool of {tokens} tokens"
            found.append(min(tokens, int(size["contextLen"])))
    release = render(values)
    assert noted_contexts(release.notes) == found
    gpus = [
        each for each in pods(release) if each.component in ("worker", "prefill") and each.container()["image"].endswith("-cuda")
    ]
    assert len(gpus) == len(found), "every worker with a GPU has gpuMemoryGB and a model of known size"


def test_size_set_for_a_model_overrides_the_table_of_sizes() -> None:
    values = values_for("Qwen/Qwen3-8B", 80)
    values["models"][0]["size"] = {"weightsGB": 70}
    assert "no page of KV fits on a GPU of 80 GB (gpuMemoryGB): the weights take 70 GB" in refusal(values)
    values["models"][0] |= {"source": "org/of-ours", "size": {"weightsGB": 30, "kvKiBPerToken": 160, "contextLen": 1_000_000}}
    size = {"weightsGB": 30.0, "kvKiBPerToken": 160.0}
    assert noted_contexts(render(values).notes) == [worker_pages(size, 80, {}) * 16]


def test_weights_need_twice_the_memory_when_the_dtype_is_float32() -> None:
    assert "no page of KV fits" in refusal(values_for("Qwen/Qwen3-14B", 60, dtype="float32"))
    assert refusal(values_for("Qwen/Qwen3-14B", 60)) == ""


def test_kv_pool_of_prefill_workers_is_checked_with_their_own_settings() -> None:
    values = merged(
        values_for("Qwen/Qwen3-32B", 80), {"worker": {"prefill": {"replicas": 1, "settings": {"mem_fraction_static": 0.5}}}}
    )
    assert "model demo: worker.prefill: no page of KV fits" in refusal(values)


@pytest.mark.by_day(one_in=3)
@pytest.mark.parametrize(
    "resource",
    [
        "nvidia.com/gpu",
        "nvidia.com/gpu.shared",
        "nvidia.com/mig-1g.5gb",
        "nvidia.com/mig-3g.40gb.me",
        "nvidia.com/GRID_V100D-8Q",
        "amd.com/gpu",
        "amd.com/cpx_nps4",
        "gpu.intel.com/i915",
        "gpu.intel.com/xe",
        "intel.com/gpu",
        "aliyun.com/gpu-mem",
        "volcano.sh/vgpu-number",
        "tencent.com/vcuda-core",
        "deviceclass.resource.kubernetes.io/gpu.nvidia.com",
    ],
)
def test_chart_refuses_a_gpu_in_resources_when_the_value_gpus_is_0(resource: str) -> None:
    for kind in ("limits", "requests"):
        asked = {"resources": {kind: {resource: 1}}}
        assert f"worker.resources.{kind} has {resource}, and worker.gpus is 0" in refusal({"worker": asked})
        assert "set worker.gpus to 1" in refusal({"worker": asked})
        assert "set worker.gpus of this model (models[1].worker.gpus) to 1" in refusal(
            {"models": [model("a"), model("b", worker=asked)]}
        )
        assert f"worker.prefill.resources.{kind} has {resource}, and worker.gpus is 0" in refusal({"worker": {"prefill": asked}})


def test_chart_accepts_other_devices_and_gpus_that_the_value_gpus_counts() -> None:
    for limits in ({"rdma/hca_shared": 1}, {"intel.com/qat": 1}, {"nvidia.com/gpu": 0}, {"hugepages-2Mi": "1Gi"}):
        assert refusal({"worker": {"resources": {"limits": limits}}}) == "", limits
    named = merged({"resources": GPU_RESOURCES}, {"gpus": 1, "resources": {"limits": {"nvidia.com/gpu": 1}}})
    assert refusal({"worker": named}) == ""

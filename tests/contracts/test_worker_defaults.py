"""The worker's settings are the only source of defaults. Each field of SchedulerConfig gets the value of its setting."""

from __future__ import annotations

import ast
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from rootstock_llm.services.shared.settings import CONFIG
from rootstock_llm.services.sim.core.run.config_flags import SETTINGS
from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.core.control import RANGES, Range
from rootstock_llm.services.worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
BINDING = "services/worker/scheduler_config.py"
MODEL = "services/worker/exec/contracts/model_info.py"
ENGINE = "services/worker/engine.py"
TIERS = "services/worker/tier_options.py"
PEERS = "services/worker/peer_options.py"
CORPUS = "services/worker/draft_corpus.py"
MAIN = "services/worker/__main__.py"
CONTROL = "services/worker/__main__.py"
TRACING = "services/shared/observe/tracing.py"
TLS = "services/shared/tls/mutual_tls.py"

# Fields of SchedulerConfig without a setting → file that determines the value.
FIELDS_WITHOUT_A_SETTING = {
    "num_pages": MODEL,
    "page_size": MODEL,
    "context_len": MODEL,
    "vocab_size": MODEL,
    "eos_token_ids": MODEL,
    "whole_prompts": MODEL,
    "pooling_reuses_prefix": MODEL,
    "graph_rows": MODEL,
    "graph_rereads": MODEL,
    "eager_step_cost": MODEL,
    "max_drafts": MODEL,
    "drafts_by_model": MODEL,
    "host_pages": MODEL,
    "has_storage": MODEL,
    "page_bytes": MODEL,
    "reads_peers": MODEL,
    "bos_token_id": ENGINE,
    "random_seed": BINDING,
    "groups": MODEL,
    "experts": MODEL,
}
# Fields that are computed from their setting and other values. tests/services/worker/test_engine_config.py tests each of them.
COMPUTED = {"max_prefill_tokens", "chunked_prefill_size", "enable_mixed_chunk", "enable_radix_cache", "state_interval"}
# Settings without a field of SchedulerConfig → file that reads the setting.
SETTINGS_ELSEWHERE = {
    "host": MAIN,
    "port": MAIN,
    "log_level": MAIN,
    "grace_s": MAIN,
    "metrics_host": MAIN,
    "metrics_port": MAIN,
    "worker_id": "services/worker/worker_id.py",
    "redis_url": MAIN,
    "pod_name": MAIN,
    "pod_namespace": MAIN,
    "allow_auto_truncate": MAIN,
    "stream_interval": MAIN,
    "enable_return_routed_experts": MAIN,
    "enable_overlap": MAIN,
    "consecutive_prefill_overlap": MAIN,
    "watchdog_timeout_s": MAIN,
    "health_port": MAIN,
    "mtls_cert_file": TLS,
    "mtls_key_file": TLS,
    "mtls_ca_file": TLS,
    "mtls_token_file": TLS,
    "otlp_endpoint": TRACING,
    "trace_sample_ratio": TRACING,
    "control_host": CONTROL,
    "control_port": CONTROL,
    "control_token": CONTROL,
    "control_token_file": CONTROL,
    "profile_dir": CONTROL,
    "model": ENGINE,
    "served_model_name": ENGINE,
    "chat_template": ENGINE,
    "executor": ENGINE,
    "device": ENGINE,
    "attention_backend": ENGINE,
    "cuda_graphs": ENGINE,
    "cuda_graph_max_rows": ENGINE,
    "load_threads": ENGINE,
    "dtype": ENGINE,
    "quantization": ENGINE,
    "quantize_head": ENGINE,
    "deterministic": ENGINE,
    "num_threads": ENGINE,
    "context_len": ENGINE,
    "page_size": ENGINE,
    "mem_fraction_static": ENGINE,
    "max_total_tokens": ENGINE,
    "swa_full_tokens_ratio": ENGINE,
    "mamba_full_memory_ratio": ENGINE,
    "max_mamba_cache_size": ENGINE,
    "enable_prefix_index": ENGINE,
    "grammar_compile_timeout_s": ENGINE,
    "grammar_memory_mib": ENGINE,
    "grammar_cache_mib": ENGINE,
    "grammar_idle_s": ENGINE,
    "grammar_workers": ENGINE,
    "grammar_step_ms": ENGINE,
    "grammar_burst_ms": ENGINE,
    "grammar_fill_ms": ENGINE,
    "grammar_mask_threads": ENGINE,
    "enable_jump_forward": ENGINE,
    "sampling_defaults": ENGINE,
    "speculative_algorithm": ENGINE,
    "speculative_draft_model_path": ENGINE,
    "speculative_num_steps": ENGINE,
    "speculative_ngram_external_corpus_path": CORPUS,
    "speculative_ngram_external_corpus_max_tokens": CORPUS,
    "preferred_sampling_params": ENGINE,
    "enable_hierarchical_cache": TIERS,
    "hicache_ratio": TIERS,
    "hicache_size": TIERS,
    "hicache_memory_fraction": TIERS,
    "hicache_storage_backend": TIERS,
    "hicache_storage_dir": TIERS,
    "hicache_storage_size": TIERS,
    "hicache_storage_url": TIERS,
    "hicache_storage_secret_file": TIERS,
    "hicache_storage_ttl_s": TIERS,
    "disaggregation_mode": PEERS,
    "disaggregation_host": PEERS,
    "disaggregation_port": PEERS,
    "disaggregation_tls_cert_file": PEERS,
    "disaggregation_tls_key_file": PEERS,
    "disaggregation_tls_ca_file": PEERS,
    "disaggregation_shm_dir": PEERS,
    "disaggregation_transfer_backend": PEERS,
    "fake_step_s": ENGINE,
}
# Settings in SETTINGS_ELSEWHERE that the simulator also uses.
SIMULATED_ELSEWHERE = {"page_size", "context_len", "enable_overlap"}


def tree_of(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def calls(tree: ast.Module, name: str) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == name]


def attributes(node: ast.AST, owner: str) -> set[str]:
    """Returns the names of the attributes that the node reads from the variable `owner`."""
    found = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
    return {each.attr for each in found if isinstance(each.value, ast.Name) and each.value.id == owner}


@pytest.fixture(scope="module")
def binding() -> dict[str, ast.expr]:
    """Returns the expression of each field in the worker's call of SchedulerConfig."""
    (call,) = calls(tree_of(BINDING), "SchedulerConfig")
    assert not call.args and all(keyword.arg for keyword in call.keywords), "the call must pass every field as a keyword argument"
    return {str(keyword.arg): keyword.value for keyword in call.keywords}


def test_scheduler_config_has_no_defaults() -> None:
    for field in fields(SchedulerConfig):
        assert field.default is MISSING and field.default_factory is MISSING, field.name


def test_every_scheduler_field_gets_the_value_of_the_setting_of_the_same_name(binding: dict[str, ast.expr]) -> None:
    assert set(binding) == {field.name for field in fields(SchedulerConfig)}
    read = {name: attributes(value, "settings") for name, value in binding.items()}
    assert {name for name, settings in read.items() if not settings} == set(FIELDS_WITHOUT_A_SETTING)
    assert [name for name, settings in read.items() if settings and settings != {name}] == []
    plain = {name for name, value in binding.items() if ast.unparse(value) == f"settings.{name}"}
    assert {name for name, settings in read.items() if settings} - plain == COMPUTED, (
        "each field must equal its setting or be listed in COMPUTED"
    )


def test_scheduler_fields_listed_as_constant_get_constants(binding: dict[str, ast.expr]) -> None:
    """The values that come from the model and its tokenizer are tested in tests/services/worker/test_engine_config.py."""
    constants = [name for name, owner in FIELDS_WITHOUT_A_SETTING.items() if owner == BINDING]
    assert constants and all(ast.unparse(binding[name]).isupper() for name in constants)


def test_every_worker_setting_is_read_somewhere(binding: dict[str, ast.expr]) -> None:
    bound = set(binding) - set(FIELDS_WITHOUT_A_SETTING)
    assert not bound & set(SETTINGS_ELSEWHERE)
    read = bound | set(SETTINGS_ELSEWHERE) | {CONFIG}  # load() reads CONFIG before it creates the settings
    assert read == set(WorkerSettings.model_fields), "a setting has no reader, or a listed name is no setting"


@pytest.mark.by_day(one_in=4)
@pytest.mark.parametrize("path", sorted(set(SETTINGS_ELSEWHERE.values())))
def test_each_listed_file_reads_the_settings_listed_for_the_file(path: str) -> None:
    owned = {name for name, owner in SETTINGS_ELSEWHERE.items() if owner == path}
    assert owned - attributes(tree_of(path), "settings") == set()


def test_simulation_uses_every_scheduler_setting(binding: dict[str, ast.expr]) -> None:
    assert set(SETTINGS_ELSEWHERE) >= SIMULATED_ELSEWHERE
    assert set(SETTINGS) == (set(binding) - set(FIELDS_WITHOUT_A_SETTING)) | SIMULATED_ELSEWHERE
    assert len(SETTINGS) == len(set(SETTINGS))


def test_only_two_files_make_a_scheduler_config() -> None:
    pinned = "tests/benchmarks/pinned_config.py"
    other = ROOT / "tests/benchmarks/engines/drivers"  # scripts of other engines; OpenVINO has a class of this name
    paths = [path for top in ("services", "tests") for path in (ROOT / top).rglob("*.py") if other not in path.parents]
    makers = {str(path.relative_to(ROOT)) for path in paths if calls(ast.parse(path.read_text()), "SchedulerConfig")}
    assert makers == {BINDING, pinned}


def range_of(name: str) -> Range | None:
    """Returns the range in the annotation of a setting, or None if it is not a number."""
    field = WorkerSettings.model_fields[name]
    if field.annotation not in (int, float, int | None):
        return None
    bounds = {kind: getattr(each, kind) for each in field.metadata for kind in ("ge", "gt", "le") if hasattr(each, kind)}
    return Range(bounds.get("ge", bounds.get("gt", 0)), "gt" in bounds, bounds.get("le", float("inf")))


@pytest.mark.parametrize("name", RANGES)
def test_tunable_has_the_range_of_the_setting_of_the_same_name(name: str) -> None:
    setting = range_of(name)
    # The setting max_running_requests may be 0, so that the worker chooses the number at its start. The tunable must be 1 or
    # more.
    assert RANGES[name] == (Range(1) if name == "max_running_requests" else setting)


@pytest.mark.parametrize("name", RANGES)
def test_tunable_has_a_row_in_docs(name: str) -> None:
    assert f"| `{name}` | " in (ROOT / "docs/reference/control.md").read_text()

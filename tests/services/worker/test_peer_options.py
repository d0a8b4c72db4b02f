"""Tests of the options for KV transfers between workers, and of settings that exclude each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rootstock_llm.services.worker.peer_options import peer_options
from rootstock_llm.services.worker.settings import WorkerSettings
from tests.exec.remote_kv.carriers import FAKE
from tests.exec.remote_kv.certificates import Authority

TLS = ("disaggregation_tls_cert_file", "disaggregation_tls_key_file", "disaggregation_tls_ca_file")


def options_of(**changes: Any) -> object:
    return peer_options(WorkerSettings(model="fake", **changes), lambda released: None)


def test_unified_worker_has_no_options_for_kv_transfers() -> None:
    assert options_of() is None


@pytest.mark.by_day(one_in=2, seed=60)
@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("missing", TLS)
def test_kv_transfer_over_tls_needs_all_three_files(mode: str, missing: str) -> None:
    given = {name: "file.pem" for name in TLS if name != missing}
    with pytest.raises(ValueError, match=f"not set: --{missing.replace('_', '-')}"):
        options_of(disaggregation_mode=mode, **given)


def test_error_names_an_unusable_tls_file(tmp_path: Path) -> None:
    files = {name: str(tmp_path / name) for name in TLS}
    with pytest.raises(ValueError, match=r"--disaggregation-tls-cert-file.*No such file"):
        options_of(disaggregation_mode="decode", **files)
    for path in files.values():
        Path(path).write_text("no certificate")
    with pytest.raises(ValueError, match=r"--disaggregation-tls-cert-file.*PEM"):
        options_of(disaggregation_mode="decode", **files)


def test_disaggregation_needs_the_radix_cache() -> None:
    with pytest.raises(ValueError, match="radix cache"):
        options_of(disaggregation_mode="prefill", enable_radix_cache=False)


def test_nixl_is_refused_when_tls_is_set(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    files = dict(zip(TLS, map(str, authority.files("worker")), strict=True))
    assert options_of(disaggregation_mode="decode", **files) is not None
    with pytest.raises(ValueError, match="nixl does not encrypt"):
        options_of(disaggregation_mode="decode", disaggregation_transfer_backend="nixl", **files)


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize(("mode", "library", "reason"), [("prefill", "broken", "libuct"), ("decode", "blind", "NIXL has no UCX")])
def test_kv_uses_tcp_with_a_warning_when_nixl_is_unusable(
    mode: str, library: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    monkeypatch.setenv("NIXL_FAKE", library)
    options = peer_options(WorkerSettings(model="fake", disaggregation_mode=mode, disaggregation_transfer_backend="nixl"), print)
    assert options is not None
    opened = options.open_reader(b"", 640) if options.open_reader else options.open_server(b"", 640, print)  # type: ignore
    opened.close()
    (said,) = (each for each in caplog.records if each.levelname == "WARNING")
    assert "KV transfers use TCP" in said.message and reason in said.__dict__["fields"]["error"]

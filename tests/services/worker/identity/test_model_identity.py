"""Tests of the model version: equal for equal bytes in any folder, different for one changed byte."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from rootstock_llm.services.worker.core.kv.radix_cache import tree_name
from rootstock_llm.services.worker.engine import EXECUTORS, LoadedExecutor, OnLost, build_engine
from rootstock_llm.services.worker.exec.contracts.options import TierOptions
from rootstock_llm.services.worker.identity import weights_revision
from rootstock_llm.services.worker.identity.model_identity import ModelIdentity, identify_model
from rootstock_llm.services.worker.identity.weights_revision import WeightsReading, weight_form
from rootstock_llm.services.worker.loop.inbox import Inbox
from rootstock_llm.services.worker.settings import WorkerSettings
from tests.all_pairs import each_value

SIZE = 10_001


def make_folder(path: Path) -> Path:
    """Makes a model folder with two weight files of random bytes, which are the same for every call."""
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    for number in (1, 2):
        (path / f"model-0000{number}-of-00002.safetensors").write_bytes(random.Random(number).randbytes(SIZE))
    return path


def revision_of(path: Path, form: bytes = b"") -> str:
    with WeightsReading(path, form) as reading:
        return reading.revision()


def identity_of(path: Path, name: str = "") -> ModelIdentity:
    return identify_model(path, name, revision_of(path))


@pytest.mark.by_day(one_in=2, seed=2)
@each_value(at={"first": 0, "middle": SIZE // 2, "last": SIZE - 1}, number=[1, 2])
def test_revision_of_a_model_changes_when_one_byte_changes(tmp_path: Path, number: int, at: int) -> None:
    folder = make_folder(tmp_path / "model")
    before = revision_of(folder)
    file = folder / f"model-0000{number}-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    assert revision_of(folder) != before
    data[at] ^= 1
    file.write_bytes(data)
    assert revision_of(folder) == before, "times of files do not matter"


def test_revision_depends_on_the_order_of_pieces_but_not_on_the_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_revision, "PIECE_BYTES", 1000)
    monkeypatch.setattr(weights_revision, "BUFFER_BYTES", 300)
    folder = make_folder(tmp_path / "model")

    def revision(num_threads: int) -> str:
        with WeightsReading(folder, num_threads=num_threads) as reading:
            return reading.revision()

    before = revision(1)
    assert revision(4) == before
    file = folder / "model-00001-of-00002.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[1000:2000] + data[:1000] + data[2000:])
    assert revision(4) != before


def test_revision_of_quantized_weights_depends_on_form_and_codes_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "model")
    forms = [weight_form(scheme, head) for scheme in ("auto", "int8", "int4") for head in (False, True)]
    assert len({revision_of(folder, form) for form in forms}) == len(forms)
    # Releases without quantization compute this revision. It must stay equal, so that an update can move requests with output
    # to new workers.
    assert revision_of(folder) == "51f7fa91ce73220cb3db0217483ee2d0"
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    quantized = revision_of(folder)
    monkeypatch.setattr(weights_revision, "CODES_VERSION", 2)
    assert revision_of(folder) != quantized


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json", "model.safetensors.index.json"])
def test_revision_depends_on_each_optional_file(tmp_path: Path, name: str) -> None:
    folder = make_folder(tmp_path / "model")
    revisions = {revision_of(folder)}
    for bits in (4, 8):
        (folder / name).write_text(f'{{"bits": {bits}}}')
        revisions.add(revision_of(folder))
    assert len(revisions) == 3


def test_revision_is_equal_for_a_copy_in_another_folder(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    shutil.copytree(folder, tmp_path / "elsewhere" / "release-7")
    assert revision_of(tmp_path / "elsewhere" / "release-7") == revision_of(folder)


def served_folder(path: Path) -> Path:
    """Makes a model folder that the fake executor can load."""
    folder = make_folder(path)
    (folder / "config.json").write_text('{"vocab_size": 100, "max_position_embeddings": 64}')
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    return folder


def test_versions_and_block_hashes_differ_when_workers_quantize_a_folder_differently(tmp_path: Path) -> None:
    """Prefix index, tiers, KV transfers and replays compare model versions and block hashes."""
    folder, versions, roots = served_folder(tmp_path / "model"), [], []
    for form in ({}, {"quantization": "int8"}, {"quantization": "int8"}, {"quantize_head": True}):
        settings = WorkerSettings(model=str(folder), executor="fake", **form)  # type: ignore[arg-type]
        engine = build_engine(settings, Inbox(), lambda sentence: None)
        revision = engine.weights.identity.revision
        versions.append(revision)
        roots.append(engine.weights.tree_root(tree_name(revision, "")))
        engine.close()
    assert versions[1] == versions[2] and roots[1] == roots[2], "workers with one form share KV"
    assert len(set(versions)) == len(set(roots)) == 3


def test_worker_does_not_start_when_weights_change_during_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = served_folder(tmp_path / "model")
    closed: list[bool] = []

    def load(settings: WorkerSettings, on_lost: OnLost, tiers: TierOptions | None) -> LoadedExecutor:
        built = make_fake(settings, on_lost, tiers)
        (folder / "model-00002-of-00002.safetensors").write_bytes(b"half a copy")
        monkeypatch.setattr(built.executor, "close", lambda: closed.append(True))
        return built

    make_fake = EXECUTORS["fake"]
    monkeypatch.setitem(EXECUTORS, "fake", load)
    with pytest.raises(ValueError, match=r"model-00002-of-00002.safetensors"):
        build_engine(WorkerSettings(model=str(folder), executor="fake"), Inbox(), lambda sentence: None)
    assert closed

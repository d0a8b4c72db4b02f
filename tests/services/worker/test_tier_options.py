"""Tests of the tier options: settings that exclude each other, owners of the secret, and unusable disks."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rootstock_llm.services.shared.settings import of_values
from rootstock_llm.services.worker.core.tiers.page_keys import SECRET_BYTES
from rootstock_llm.services.worker.exec.contracts.options import TierOptions
from rootstock_llm.services.worker.exec.tiers.make_tiers import NotEnoughHostMemory, host_pages, host_slab
from rootstock_llm.services.worker.settings import WorkerSettings
from rootstock_llm.services.worker.tier_options import GB, tier_options

SHARED = {
    "enable_hierarchical_cache": True,
    "hicache_storage_backend": "redis",
    "hicache_storage_url": "redis://store:6379/1",
    "hicache_storage_secret_file": "secret",
}
PAGE, IDENTITY = 4096, bytes(32)


def options(**values: Any) -> TierOptions | None:
    return tier_options(of_values(WorkerSettings, values))


def in_files(folder: Path, **values: Any) -> TierOptions:
    found = options(
        enable_hierarchical_cache=True, hicache_storage_backend="file", hicache_storage_dir=str(folder), worker_id="w", **values
    )
    assert found is not None
    return found


def test_kv_tiers_are_off_by_default() -> None:
    assert options() is None


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"hicache_storage_backend": "file", "hicache_storage_dir": "kv"}, "needs --enable-hierarchical-cache"),
        ({"enable_hierarchical_cache": True, "enable_radix_cache": False}, "needs the radix cache"),
        ({"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}, "must be set together"),
        ({"enable_hierarchical_cache": True, "hicache_storage_dir": "kv"}, "must be set together"),
        ({"enable_hierarchical_cache": True, "hicache_storage_salt_quota": 1.0}, "salt-quota needs --hicache-storage-backend"),
        ({**SHARED, "hicache_storage_secret_file": ""}, "needs --hicache-storage-url and"),
        ({**SHARED, "redis_url": "redis://store"}, "prefix index's Redis"),
        ({**SHARED, "hicache_storage_url": "http://store"}, "--hicache-storage-url is not a redis://"),
        ({**SHARED, "redis_url": "http://index"}, "--redis-url is not a redis://"),
        ({**SHARED, "hicache_storage_secret_file": "nowhere/secret"}, "No such file"),
        ({**SHARED, "hicache_storage_secret_file": os.devnull}, "needs at least 32"),
    ],
)
def test_error_names_conflicting_or_unusable_tier_settings(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        options(**values)


@pytest.mark.parametrize("name", ["..", "a/b", "/a"])
def test_worker_id_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    flags = {"enable_hierarchical_cache": True, "hicache_storage_backend": "file", "hicache_storage_dir": str(tmp_path)}
    with pytest.raises(ValueError, match="cannot name the worker's folder"):
        options(worker_id=name, **flags)
    assert list(tmp_path.iterdir()) == []


def test_workers_with_the_same_secret_file_share_one_storage_secret(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).write_bytes(name.encode() * 32)
    first, second, other = (
        options(**SHARED | {"hicache_storage_secret_file": str(tmp_path / name)}) for name in ("one", "one", "other")
    )
    assert first is not None and second is not None and other is not None
    assert first.secret == second.secret != other.secret and len(first.secret) == SECRET_BYTES
    assert first.open_storage is not None
    store = first.open_storage(PAGE, IDENTITY)
    assert store is not None and store.shared and store.page_bytes == PAGE
    store.close()


def test_salt_quota_is_refused_when_smaller_than_a_page(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"one" * 32)
    shared = SHARED | {"hicache_storage_secret_file": str(tmp_path / "one")}
    for found in (in_files(tmp_path, hicache_storage_salt_quota=1e-6), options(**shared, hicache_storage_salt_quota=1e-6)):
        assert found is not None and found.open_storage is not None
        with pytest.raises(ValueError, match="is 1000 bytes; a page needs at least"):
            found.open_storage(PAGE, IDENTITY)
        store = found.open_storage(100, IDENTITY)
        assert store is not None
        store.close()


def test_workers_with_only_a_host_tier_have_different_secrets() -> None:
    first, second = (options(enable_hierarchical_cache=True, hicache_size=3) for _ in range(2))
    assert first is not None and second is not None
    assert first.host_bytes == 3 * GB and first.open_storage is None
    assert len(first.secret) == SECRET_BYTES and first.secret != second.secret
    assert repr(first.secret) not in repr(first)


def test_secret_file_outlives_the_worker_and_is_private(tmp_path: Path) -> None:
    first = in_files(tmp_path)
    assert in_files(tmp_path).secret == first.secret
    assert (tmp_path / "w" / "secret").stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in (tmp_path / "w").iterdir()) == ["secret"], "no partial file is left"
    other = options(
        enable_hierarchical_cache=True, hicache_storage_backend="file", hicache_storage_dir=str(tmp_path), worker_id="x"
    )
    assert other is not None and other.secret != first.secret


def test_secret_is_refused_when_other_users_can_read_the_file(tmp_path: Path) -> None:
    in_files(tmp_path)
    (tmp_path / "w" / "secret").chmod(0o640)
    with pytest.raises(ValueError, match="belongs to another user or is readable by others"):
        in_files(tmp_path)


def test_secret_of_wrong_length_is_refused(tmp_path: Path) -> None:
    in_files(tmp_path)
    (tmp_path / "w" / "secret").write_bytes(b"short")
    with pytest.raises(ValueError, match="not exactly 32 bytes"):
        in_files(tmp_path)


def test_secret_file_behind_a_symbolic_link_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "elsewhere").write_bytes(bytes(SECRET_BYTES))
    os.symlink(tmp_path / "elsewhere", tmp_path / "w" / "secret")
    assert in_files(tmp_path).open_storage is None and "without the file tier" in caplog.text


def test_worker_runs_without_file_tier_when_the_folder_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "w").write_text("a file stands there")
    assert in_files(tmp_path).open_storage is None and "without the file tier" in caplog.text


def test_worker_runs_without_file_tier_when_the_store_cannot_be_opened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = in_files(tmp_path)
    (tmp_path / "w" / "pages").write_text("a file stands there")
    assert found.open_storage is not None
    assert found.open_storage(PAGE, IDENTITY) is None and "without the file tier" in caplog.text


def test_second_worker_with_the_same_id_cannot_open_the_folder(tmp_path: Path) -> None:
    found = in_files(tmp_path)
    assert found.open_storage is not None
    store = found.open_storage(PAGE, IDENTITY)
    assert store is not None
    with pytest.raises(ValueError):
        found.open_storage(PAGE, IDENTITY)
    store.close()


class TestHostTierSize:
    def sized(self, ratio: float = 2.0, size: int = 0, free: int = 1000 * PAGE) -> int:
        return host_pages(TierOptions(ratio, size, None, bytes(SECRET_BYTES)), 100, PAGE, free)

    def test_host_tier_size_follows_the_ratio_or_the_configured_size(self) -> None:
        assert self.sized() == 200 and self.sized(size=50 * PAGE) == 50

    def test_host_tier_ratio_uses_at_most_a_quarter_of_the_free_memory(self) -> None:
        assert self.sized(ratio=20.0) == 250

    @pytest.mark.parametrize(("share", "pool", "pages"), [(0.125, 100, 125), (0.25, 500, 250), (0.25, 900, 80)])
    def test_host_tier_with_a_ratio_fits_beside_a_kv_pool_in_host_memory(self, share: float, pool: int, pages: int) -> None:
        options = TierOptions(20.0, 0, None, bytes(SECRET_BYTES), host_share=share)
        assert host_pages(options, 100, PAGE, 1000 * PAGE, pool * PAGE) == pages

    def test_configured_host_tier_size_is_refused_when_the_memory_is_not_free(self) -> None:
        with pytest.raises(
            NotEnoughHostMemory,
            match=r"hicache_size is \d+ MiB; \d+ MiB are free after the KV pool.* Turn enable_hierarchical_cache off",
        ):
            self.sized(size=900 * PAGE)

    def test_memory_of_the_host_tier_is_allocated_at_once(self) -> None:
        slab = host_slab(64, 1 << 18)
        there = (ctypes.c_ubyte * (slab.nbytes // mmap.PAGESIZE))()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(slab.data_ptr()), ctypes.c_size_t(slab.nbytes), there) == 0
        assert all(each & 1 for each in there), "all pages of the slab are resident"
        assert slab.shape == (64, 1 << 18) and slab.dtype == torch.uint8 and not slab.any()

    def test_host_tier_is_refused_when_no_page_fits(self) -> None:
        """The KV pool needs more than all free memory."""
        with pytest.raises(NotEnoughHostMemory, match="cannot hold a page"):
            self.sized(free=-5 * PAGE)

"""Tests of the API key file: fields, faults and changes."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any

import orjson
import pytest

from rootstock_llm.services.gateway.keys.__main__ import main
from rootstock_llm.services.gateway.keys.key_table import BadKeys, KeyFile, KeyShares, parse_keys
from rootstock_llm.services.shared import limits

A = {"name": "a", "key": "secret"}


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def content(*entries: Any) -> bytes:
    return orjson.dumps({"keys": list(entries)})


def test_entry_of_the_key_file_may_have_several_secrets_and_only_digests_are_stored() -> None:
    whole = {"weight": 2, "priority": -1, "requests_per_minute": 600, "tokens_per_minute": 10**5, "max_concurrent": 64}
    table = parse_keys([content({"name": "team-a", "sha256": [digest("old"), digest("new").upper()], "key": "plain", **whole})])
    (key,) = table
    assert {table.of_secret(secret) for secret in (b"old", b"new", b"plain")} == {key}
    assert table.of_secret(b"other") is None and table.of_secret(digest("old").encode()) is None
    assert {name: getattr(key, name) for name in whole} == whole and "plain" not in repr(key)


FAULTS: dict[str, tuple[bytes, str]] = {
    "not JSON": (b'{"keys": [\n  {"name" "a"}]}', "line 2, column"),
    "another field": (b'{"keys": [], "more": 1}', 'one field, "keys"'),
    "no list": (b'{"keys": {}}', "keys: must be a list"),
    "too many": (content(*[A] * (limits.MAX_KEYS + 1)), f"at most {limits.MAX_KEYS}"),
    "unknown field": (content({**A, "rpm": 5}), "keys[0]: unknown field 'rpm'"),
    "name": (content({**A, "name": "a b"}), "keys[0].name"),
    "name's length": (content({**A, "name": "a" * (limits.MAX_KEY_NAME_CHARS + 1)}), "keys[0].name"),
    "same name": (content(A, {**A, "key": "other"}), "a: two API keys have this name"),
    "same key": (content(A, {"name": "b", "sha256": digest("secret")}), "b: the API key a has the same value"),
    "models": (content({**A, "models": []}), "keys[0].models: must be a list of 1 to"),
    "a model's name": (content({**A, "models": ["a", ""]}), "keys[0].models"),
    "a model's long name": (content({**A, "models": ["a" * (limits.MAX_MODEL_NAME_CHARS + 1)]}), "keys[0].models"),
    "too many models": (content({**A, "models": ["a"] * (limits.MAX_MODELS_OF_A_KEY + 1)}), "keys[0].models"),
    "expires": (content({**A, "expires": "tomorrow"}), "keys[0].expires: must be a time with its zone"),
    "expires without a zone": (content({**A, "expires": "2027-01-31T00:00:00"}), "keys[0].expires"),
    "digest": (content({"name": "a", "sha256": ["00"]}), "keys[0].sha256[0]: must be 64 hexadecimal digits"),
    "too many digests": (
        content({"name": "a", "sha256": ["00"] * (limits.MAX_SECRETS_OF_A_KEY + 1)}),
        "keys[0].sha256",
    ),
    "no key": (content({"name": "a"}), "keys[0]: has neither sha256 nor key"),
    "key": (content({"name": "a", "key": "a b"}), "keys[0].key"),
    "key's length": (content({"name": "a", "key": "x" * (limits.MAX_KEY_CHARS + 1)}), "keys[0].key"),
    "weight": (content({**A, "weight": 0}), "keys[0].weight"),
    "weight beyond": (content({**A, "weight": limits.MAX_KEY_WEIGHT + 1}), "keys[0].weight"),
    "limit beyond": (content({**A, "tokens_per_minute": limits.MAX_KEY_LIMIT + 1}), "keys[0].tokens_per_minute"),
    "a flag is no number": (content({**A, "requests_per_minute": True}), "keys[0].requests_per_minute"),
    "a limit of none": (content({**A, "max_concurrent": 0}), "keys[0].max_concurrent"),
    "priority": (content({**A, "priority": 1 << 31}), "keys[0].priority"),
    "the operators' token": (content({"name": "a", "key": "admin"}), "a: control_token must not be an API key"),
}


def test_key_file_with_values_at_the_limits_is_accepted() -> None:
    digests = [digest(str(at)) for at in range(limits.MAX_SECRETS_OF_A_KEY)]
    most = {"weight": limits.MAX_KEY_WEIGHT, "tokens_per_minute": limits.MAX_KEY_LIMIT, "priority": limits.PRIORITY_RANGE[1]}
    large = {"name": "a" * limits.MAX_KEY_NAME_CHARS, "sha256": digests, "key": "x" * limits.MAX_KEY_CHARS, **most}
    others = [{"name": f"k{at}", "key": f"k{at}"} for at in range(limits.MAX_KEYS - 1)]
    table = parse_keys([content(large, *others)])
    assert len(table) == limits.MAX_KEYS and table.of_secret(b"x" * limits.MAX_KEY_CHARS) is table.named("a" * 64)


@pytest.mark.by_day(one_in=2, seed=35)
@pytest.mark.parametrize("case", FAULTS)
def test_error_names_the_bad_field_of_the_key_file(case: str) -> None:
    text, place = FAULTS[case]
    with pytest.raises(BadKeys) as error:
        parse_keys([text], {hashlib.sha256(b"admin").digest(): "control_token"})
    assert place in str(error.value) and "secret" not in str(error.value)


def replace(path: Path, text: bytes) -> None:
    path.with_suffix(".new").write_bytes(text)
    path.with_suffix(".new").rename(path)


def test_key_file_applies_changes_and_ignores_invalid_files(tmp_path: Path) -> None:
    """Changes include replaced links, as Kubernetes makes them, and a file of the same size and time with other content."""
    first, second = content(A), content({"name": "a", "key": "sekret"})
    for number, text in enumerate((first, b"{", second)):
        (tmp_path / f"v{number}").mkdir()
        (tmp_path / f"v{number}" / "keys.json").write_bytes(text)
    link, path = tmp_path / "data", tmp_path / "data" / "keys.json"

    def turn(number: int) -> None:
        os.symlink(f"v{number}", tmp_path / "next")
        os.replace(tmp_path / "next", link)

    async def run() -> None:
        turn(0)
        followed = KeyFile(str(path))
        weights = KeyShares(lambda: followed.table)
        tables = [followed.table]
        followed.listen(tables.append)
        await followed.refresh()
        assert len(tables) == 1 and dict(weights) == {"a": 1.0}
        for trouble in (lambda: turn(1), lambda: link.unlink(), lambda: turn(1)):
            trouble()
            await followed.refresh(reread=False)
            assert followed.table is tables[0] and not followed.is_valid
        turn(0)
        await followed.refresh(reread=False)
        assert followed.is_valid and followed.table.of_secret(b"secret")
        turn(2)
        await followed.refresh(reread=False)
        assert followed.table.of_secret(b"sekret") and not followed.table.of_secret(b"secret")
        before = path.stat()
        path.write_bytes(first)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        await followed.refresh()
        assert followed.table.of_secret(b"secret") and followed.table is tables[-1]

    asyncio.run(run())


def test_key_file_refuses_a_file_that_is_too_large(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(content(A).ljust(limits.MAX_KEYS_FILE_BYTES))
    assert len(KeyFile(str(path)).table) == 1
    path.write_bytes(content(A).ljust(limits.MAX_KEYS_FILE_BYTES + 1))
    with pytest.raises(BadKeys, match="larger than"):
        KeyFile(str(path))


def test_key_file_reads_all_files_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(BadKeys, match=r"has no \*\.json"):
        KeyFile(str(tmp_path))
    (tmp_path / "1.json").write_bytes(content(A))
    followed = KeyFile(str(tmp_path))
    (tmp_path / "2.json").write_bytes(content({"name": "b", "key": "other"}))
    asyncio.run(followed.refresh(reread=False))
    assert [key.name for key in followed.table] == ["a", "b"]
    (tmp_path / "2.json").write_bytes(content({"name": "a", "key": "another"}))
    asyncio.run(followed.refresh(reread=False))
    assert not followed.is_valid and len(followed.table) == 2


def test_command_keys_new_prints_a_secret_and_an_entry(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "team-a", "--weight", "2", "--max-concurrent", "4"]) == 0
    printed = capsys.readouterr()
    secret = printed.err.split()[-1]
    (key,) = table = parse_keys([content(orjson.loads(printed.out))])
    assert secret.startswith("rsk-") and table.of_secret(secret.encode()) is key and secret not in printed.out
    assert (key.name, key.weight, key.max_concurrent, key.tokens_per_minute) == ("team-a", 2.0, 4, None)
    assert main(["new", "a b"]) == 2 and "name: must be" in capsys.readouterr().err


def test_command_keys_list_shows_the_names_and_the_states_of_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.json"
    old = {"name": "old", "key": "s3cr3t", "expires": "2020-01-31T00:00:00+01:00", "models": ["b", "a"]}
    path.write_bytes(content({**A, "requests_per_minute": 600}, old))
    assert main(["list", str(path)]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[:4] for line in shown.splitlines()[1:]] == [
        ["a", "valid", "never", "all"],
        ["old", "expired", "2020-01-30T23:00:00Z", "a,b"],
    ]
    assert "s3cr3t" not in shown and "600" in shown
    assert main(["list", str(path), "--json"]) == 0
    assert [orjson.loads(line)["state"] for line in capsys.readouterr().out.splitlines()] == ["valid", "expired"]


def test_command_keys_list_reports_the_error_in_an_invalid_key_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(content({**A, "rpm": 5}))
    assert main(["list", str(path)]) == 2
    assert "unknown field 'rpm'" in capsys.readouterr().err


def test_command_keys_new_writes_the_models_and_the_expiry(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "team-a", "--models", "a, b", "--expires", "2027-01-31T00:00:00Z"]) == 0
    (key,) = parse_keys([content(orjson.loads(capsys.readouterr().out))])
    assert key.models == {"a", "b"} and key.has_expired(1801353600.0) and not key.has_expired(1801353599.0)

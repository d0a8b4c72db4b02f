"""The table of API keys, and the file or folder of *.json files from which it is parsed.

The table has the SHA-256 digest of each secret and never the secret. A request's secret is looked up by its digest, so that the
duration of the lookup reveals nothing about other secrets.

KeyFile checks the files for changes while the gateway runs. A change takes effect within a few seconds, also if Kubernetes
replaces a symbolic link. If a file is invalid, the previous API keys stay valid, and a log line and a metric report the fault.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

POLL_S = 1.0  # seconds between two checks of the files
REREAD_POLLS = 4  # number of checks after which files with an unchanged stamp are read, because a change may keep the stamp
DIGEST_BYTES = 32  # bytes of a SHA-256 digest
_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent")
FIELDS = frozenset(("name", "sha256", "key", "weight", "priority", "models", "expires", *_LIMITS))
_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{limits.MAX_KEY_NAME_CHARS}}}")
_DIGEST = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}")


class BadKeys(ValueError):
    """A file of API keys is invalid. The message names the field and the fault, and has no secret."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key with its limits. A limit applies to all gateways together, and None means no limit."""

    name: str
    digests: tuple[bytes, ...]  # SHA-256 of each secret; an API key has several while a new secret replaces an old one
    weight: float = 1.0  # weight of the API key's share of the workers while requests wait
    priority: int | None = None  # default priority of its requests, and their most urgent allowed priority
    requests_per_minute: int | None = None  # requests that begin within a minute
    tokens_per_minute: int | None = None  # tokens of prompts and completions within a minute
    max_concurrent: int | None = None  # requests that run at the same time
    models: frozenset[str] | None = None  # names of the models that it may use, or None for every model
    expires: float | None = None  # Unix seconds from which the API key is refused, or None for never

    def has_expired(self, now: float) -> bool:
        """Returns whether the API key has expired at `now`, in Unix seconds."""
        return self.expires is not None and now >= self.expires

    @property
    def is_limited(self) -> bool:
        return not self.requests_per_minute is self.tokens_per_minute is self.max_concurrent is None


class KeyTable:
    """An immutable table of API keys."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._by_name = {key.name: key for key in keys}
        self._by_digest = {digest: key for key in self._by_name.values() for digest in key.digests}

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[ApiKey]:
        return iter(self._by_name.values())

    def named(self, name: str) -> ApiKey | None:
        return self._by_name.get(name)

    def of_secret(self, secret: bytes) -> ApiKey | None:
        """Returns the API key with this secret, or None if no API key has it."""
        return self._by_digest.get(digest_of(secret))


def digest_of(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def parse_keys(contents: Iterable[bytes], forbidden: Mapping[bytes, str] | None = None) -> KeyTable:
    """Parses the contents of all files into one table.

    Args:
        forbidden: Secrets that no API key may have. Maps the digest of each secret to its description for the error.

    Raises:
        BadKeys: A file is invalid, or two API keys have the same name or secret.
    """
    keys = [key for content in contents for key in _keys(content)]
    if len(keys) > limits.MAX_KEYS:
        raise BadKeys(f"keys: the files have {len(keys)} entries together; at most {limits.MAX_KEYS} are allowed")
    _check_unique(keys, forbidden or {})
    return KeyTable(keys)


def _keys(content: bytes) -> list[ApiKey]:
    try:
        document = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise BadKeys(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    if not isinstance(document, dict) or document.keys() != {"keys"}:
        raise BadKeys('the file must be an object with one field, "keys"')
    entries = document["keys"]
    if not isinstance(entries, list):
        raise BadKeys("keys: must be a list")
    if len(entries) > limits.MAX_KEYS:
        raise BadKeys(f"keys: has {len(entries)} entries; at most {limits.MAX_KEYS} are allowed")
    return [_key(entry, f"keys[{index}]") for index, entry in enumerate(entries)]


def _check_unique(keys: Iterable[ApiKey], forbidden: Mapping[bytes, str]) -> None:
    names: set[str] = set()
    owners: dict[bytes, str] = {}
    for key in keys:
        if key.name in names:
            raise BadKeys(f"{key.name}: two API keys have this name")
        names.add(key.name)
        for digest in key.digests:
            if digest in forbidden:
                raise BadKeys(f"{key.name}: {forbidden[digest]} must not be an API key")
            if digest in owners:
                raise BadKeys(f"{key.name}: the API key {owners[digest]} has the same value")
            owners[digest] = key.name


def _key(entry: Any, where: str) -> ApiKey:
    if not isinstance(entry, dict):
        raise BadKeys(f"{where}: must be an object")
    if unknown := sorted(entry.keys() - FIELDS):
        raise BadKeys(f"{where}: unknown field {unknown[0][:64]!r}; known fields are {', '.join(sorted(FIELDS))}")
    name = entry.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadKeys(f"{where}.name: must be 1 to {limits.MAX_KEY_NAME_CHARS} of A-Z, a-z, 0-9, '.', '_' and '-'")
    return ApiKey(
        name,
        _digests(entry, where),
        _weight(entry.get("weight", 1), f"{where}.weight"),
        _whole(entry, "priority", where, limits.PRIORITY_RANGE),
        **{field: _whole(entry, field, where, (1, limits.MAX_KEY_LIMIT)) for field in _LIMITS},
        models=_models(entry.get("models"), f"{where}.models"),
        expires=_moment(entry.get("expires"), f"{where}.expires"),
    )


def _digests(entry: Mapping[str, Any], where: str) -> tuple[bytes, ...]:
    hashed, plain = entry.get("sha256", []), entry.get("key")
    hashed = [hashed] if isinstance(hashed, str) else hashed
    if not isinstance(hashed, list) or len(hashed) > limits.MAX_SECRETS_OF_A_KEY:
        raise BadKeys(f"{where}.sha256: must be a digest or a list of at most {limits.MAX_SECRETS_OF_A_KEY} digests")
    for index, digest in enumerate(hashed):
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest.lower()):
            raise BadKeys(f"{where}.sha256[{index}]: must be {2 * DIGEST_BYTES} hexadecimal digits")
    digests = [bytes.fromhex(digest) for digest in hashed]
    if plain is not None:
        if not isinstance(plain, str) or not 0 < len(plain) <= limits.MAX_KEY_CHARS or not _is_sendable(plain):
            raise BadKeys(f"{where}.key: must be 1 to {limits.MAX_KEY_CHARS} visible ASCII characters")
        digests.append(digest_of(plain.encode()))
    if not digests:
        raise BadKeys(f"{where}: has neither sha256 nor key")
    return tuple(dict.fromkeys(digests))


def _is_sendable(key: str) -> bool:
    return key.isascii() and key.isprintable() and " " not in key


def _weight(value: Any, where: str) -> float:
    if type(value) not in (int, float) or not 0 < value <= limits.MAX_KEY_WEIGHT:
        raise BadKeys(f"{where}: must be a number above 0 and at most {limits.MAX_KEY_WEIGHT}")
    return float(value)


def _whole(entry: Mapping[str, Any], field: str, where: str, bounds: tuple[int, int]) -> int | None:
    value = entry.get(field)
    if value is None:
        return None
    if type(value) is not int or not bounds[0] <= value <= bounds[1]:
        raise BadKeys(f"{where}.{field}: must be a whole number from {bounds[0]} to {bounds[1]}")
    return value


def _models(value: Any, where: str) -> frozenset[str] | None:
    if value is None:
        return None
    named = isinstance(value, list) and all(
        isinstance(name, str) and 0 < len(name) <= limits.MAX_MODEL_NAME_CHARS for name in value
    )
    if not named or not 0 < len(value) <= limits.MAX_MODELS_OF_A_KEY:
        raise BadKeys(f"{where}: must be a list of 1 to {limits.MAX_MODELS_OF_A_KEY} names of models")
    return frozenset(value)


def _moment(value: Any, where: str) -> float | None:
    """Returns the Unix seconds of an RFC 3339 time, or None for None. Raises BadKeys."""
    if value is None:
        return None
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise BadKeys(f"{where}: must be a time with its zone, such as 2027-01-31T00:00:00Z")
    return moment.timestamp()


def time_of(moment: float) -> str:
    """Returns a Unix time as RFC 3339 in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))


@dataclass(frozen=True, slots=True)
class _FileState:
    """The state of the files when they were last read."""

    stamp: tuple[tuple[int, ...], ...]  # device, inode, size and mtime_ns of each file
    digest: bytes  # SHA-256 of the contents


class KeyFile:
    """The API keys of a file or folder. Its public methods run on the event loop.

    A thread reads and parses the files. The event loop then replaces `table` with the new table.
    """

    def __init__(self, path: str, forbidden: Mapping[bytes, str] | None = None) -> None:
        """Reads the files.

        Args:
            forbidden: See parse_keys().

        Raises:
            BadKeys: A file is unreadable or invalid.
        """
        self._path = Path(path)
        self._forbidden = forbidden or {}
        self._listeners: list[Callable[[KeyTable], None]] = []
        self._read: _FileState | None
        self._fault = ""
        contents, self._read = self._load()
        self.table = self._parse(contents)

    def listen(self, changed: Callable[[KeyTable], None]) -> None:
        """Registers a function that the event loop calls with every new table."""
        self._listeners.append(changed)

    @property
    def is_valid(self) -> bool:
        """Whether the files were valid when they were last read, so that `table` has their content."""
        return not self._fault

    async def run(self) -> None:
        """Checks the files for changes every POLL_S seconds, until it is cancelled."""
        polls = 0
        while True:
            await asyncio.sleep(POLL_S)
            polls += 1
            await self.refresh(reread=polls % REREAD_POLLS == 0)

    async def refresh(self, reread: bool = True) -> None:
        """Applies a change of the files, if there is one.

        Args:
            reread: Whether the files are read even if their sizes and modification times are unchanged.
        """
        try:
            table = await asyncio.to_thread(self._changed, reread)
        except BadKeys as error:
            if self._fault != str(error):
                logger.error("the file of API keys is invalid; the previous API keys stay valid: %s", error)
            self._fault = str(error)
            return
        self._fault = ""
        if table is not None:
            self.table = table
            logger.info("read API keys", extra=fields(path=str(self._path), keys=len(table)))
            for changed in self._listeners:
                changed(table)

    def _changed(self, reread: bool) -> KeyTable | None:
        """Returns the new table, or None if the contents have not changed. Runs in a thread.

        Raises BadKeys if a file is unreadable or invalid.
        """
        before, self._read = self._read, None  # stays None if a file is invalid, so that the next check reads the files again
        if before is not None and not reread and before.stamp == self._stamp():
            self._read = before
            return None
        contents, read = self._load()
        table = None if before is not None and before.digest == read.digest else self._parse(contents)
        self._read = read
        return table

    def _load(self) -> tuple[list[bytes], _FileState]:
        stamp, contents, digest, left = self._stamp(), [], hashlib.sha256(), limits.MAX_KEYS_FILE_BYTES
        for path in self._paths():
            try:
                with path.open("rb") as file:
                    content = file.read(left + 1)
            except OSError as error:
                raise BadKeys(f"{path}: {error.strerror}") from None
            left -= len(content)
            if left < 0:
                raise BadKeys(
                    f"{path}: with this file, the files of API keys are larger than {limits.MAX_KEYS_FILE_BYTES} bytes together"
                )
            contents.append(content)
            digest.update(b"%d:" % len(content) + content)
        return contents, _FileState(stamp, digest.digest())

    def _parse(self, contents: list[bytes]) -> KeyTable:
        try:
            return parse_keys(contents, self._forbidden)
        except BadKeys as error:
            raise BadKeys(f"{self._path}: {error}") from None

    def _paths(self) -> list[Path]:
        if not self._path.is_dir():
            return [self._path]
        found = sorted(self._path.glob("*.json"))
        if not found:
            raise BadKeys(f"{self._path}: the folder has no *.json file")
        return found

    def _stamp(self) -> tuple[tuple[int, ...], ...]:
        try:
            found = [path.stat() for path in self._paths()]
        except OSError as error:
            raise BadKeys(f"{self._path}: {error.strerror}") from None
        return tuple((each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns) for each in found)


class KeyShares(Mapping[str, float]):
    """The weights of the API keys in the current table, by name of the API key."""

    def __init__(self, table: Callable[[], KeyTable]) -> None:
        self._table = table

    def __getitem__(self, name: str) -> float:
        key = self._table().named(name)
        if key is None:
            raise KeyError(name)
        return key.weight

    def __iter__(self) -> Iterator[str]:
        return (key.name for key in self._table())

    def __len__(self) -> int:
        return len(self._table())

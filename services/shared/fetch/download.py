"""Downloads a model into a temporary folder, checks its files, and renames the folder when the model is complete."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import TextIO

from rootstock_llm.services.shared.fetch.files import CHUNK, WANTED, DownloadStore, RemoteFile, Unfetchable, Unserved
from rootstock_llm.services.shared.fetch.http_client import open_url, retry
from rootstock_llm.services.shared.hf_tokenizer import TOKENIZER_FILE, VOCABULARIES
from rootstock_llm.services.shared.observe.progress import Progress
from rootstock_llm.services.shared.served_config import refusal

AT_ONCE = 4  # files that are downloaded in parallel
CONFIG = "config.json"
CONVERTER = "rootstock_llm.services.worker.text.convert_tokenizer"  # runs in a separate process; only the worker's image has it
BAR_S = 0.25  # pause between two updates of a progress bar


def fetch_file(file: RemoteFile, target: Path, count: Callable[[int], None]) -> None:
    """Downloads a file and checks it. An interrupted download leaves a .part file, from which the next download resumes.

    Args:
        count: receives each change of the number of downloaded bytes: first the size of an earlier partial download, then the
            size of each chunk. The change is negative if the file is downloaded again from its first byte.

    Raises:
        OSError, HTTPException: the download fails.
        Unfetchable: the file differs from its source.
    """
    if target.is_file():  # a file gets its final name only after its check
        count(file.size)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    part.touch()
    count(part.stat().st_size)
    retry(lambda: _append_rest(file, part, count), lambda: part.stat().st_size)
    size = part.stat().st_size
    if fault := f"it has {size} bytes, not {file.size}" if size != file.size else file.find_fault(part):
        part.unlink()
        raise Unfetchable(f"{file.name} differs from its source: {fault}. Start the download again.")
    part.rename(target)


def _append_rest(file: RemoteFile, part: Path, count: Callable[[int], None]) -> None:
    """Downloads the bytes that the .part file lacks and appends them."""
    with part.open("ab") as out:
        present = out.tell()
        if present >= file.size:
            return
        with open_url(file.url, {**file.headers(), **({"Range": f"bytes={present}-"} if present else {})}) as response:
            if present and response.status != 206:  # the server ignores the range and sends the whole file
                out.truncate(out.seek(0))
                count(-present)
            while chunk := response.read1(CHUNK):
                out.write(chunk)
                out.flush()  # so that a download resumes here after a kill
                count(len(chunk))
        os.fsync(out.fileno())
        if out.tell() < file.size:
            raise ConnectionError(f"{file.name}: the connection ended at byte {out.tell()} of {file.size}")


class Meter:
    """Prints the progress of a download: a bar on a terminal, otherwise a line every FETCH_REPORT_S seconds. Thread-safe."""

    def __init__(self, total: int, before: int, stream: TextIO) -> None:
        """Creates a meter.

        Args:
            total: bytes of all files.
            before: bytes that an earlier download left. The caller also passes them to count(). The shown rate excludes them.
        """
        self._total, self._downloaded, self._begun = total, 0, time.monotonic()
        self._before = before
        self._stream = stream
        self._lock = threading.Lock()

    def count(self, size: int) -> None:
        with self._lock:
            self._downloaded += size

    @contextlib.contextmanager
    def printed(self) -> Iterator[None]:
        """Prints the progress from a thread while the context is open."""
        ended = threading.Event()
        printer = threading.Thread(target=self._print, args=(ended,))
        printer.start()
        try:
            yield
        finally:
            ended.set()
            printer.join()

    def _print(self, ended: threading.Event) -> None:
        is_tty = self._stream.isatty()
        every_s = BAR_S if is_tty else float(os.environ.get("FETCH_REPORT_S", "5"))
        while not ended.wait(every_s):
            progress = Progress("fetch", self._downloaded, self._total, time.monotonic() - self._begun, before=self._before)
            bar = progress.bar()[: shutil.get_terminal_size().columns - 1]
            self._stream.write(f"\r{bar}\x1b[K" if is_tty else f"{progress.line()}\n")
            self._stream.flush()
        if is_tty:
            self._stream.write("\r\x1b[K")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks the folder while the context is open, so that only one process of a node downloads into it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another download into {folder}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems do not support locks
            print(f"downloading without a lock, because {folder} cannot be locked: {error}", flush=True)
        yield


def fetch(folder: Path, source: str, store: DownloadStore) -> None:
    """Downloads a model into a temporary folder and then replaces the model's folder.

    Raises:
        OSError, HTTPException: the download fails.
        Unfetchable: the model cannot be downloaded, or its source has changed during the download.
    """
    with locked(folder):
        mark, wanted = folder / store.mark, store.wanted
        if mark.is_file() and mark.read_text() == wanted:
            print(f"{folder} already has {source}", flush=True)
            return
        files = store.files()
        if not files:
            raise Unfetchable(f"the source has none of the files {', '.join(WANTED)}")
        check_convertible(file.name for file in files)
        versions = "\n".join((source, *sorted(f"{file.name} {file.version}" for file in files)))
        digest = hashlib.sha256(versions.encode()).hexdigest()[:12]
        partial = folder.with_name(f".{folder.name}.{digest}.partial")
        # Deletes temporary folders of other versions of this model. The pattern does not match models whose
        # names only begin with this model's name.
        temporary = re.compile(rf"\.{re.escape(folder.name)}\.[0-9a-f]{{12}}\.partial")
        for other in list(folder.parent.iterdir()):
            if temporary.fullmatch(other.name) and other != partial:
                shutil.rmtree(other)
        partial.mkdir(exist_ok=True)
        refuse_by_config(partial, source, files)
        download_files(partial, folder, source, files)
        if store.wanted != wanted:
            raise Unfetchable("the source has changed during the download. Start the download again.")
        complete(partial)
        (partial / store.mark).write_text(wanted)
        publish(partial, folder)


def refuse_by_config(partial: Path, source: str, files: list[RemoteFile]) -> None:
    """Downloads config.json and refuses a model that no worker serves, before its weights are downloaded.

    Raises:
        Unserved: no worker serves the model. The temporary folder is deleted.
        Unfetchable, OSError, HTTPException: the download fails.
    """
    config_file = next((file for file in files if file.name == CONFIG), None)
    if config_file is None:
        return
    fetch_file(config_file, partial / CONFIG, lambda _: None)
    try:
        config = json.loads((partial / CONFIG).read_bytes())
    except (ValueError, RecursionError):  # the worker reports a broken file
        return
    if why := refusal(config, {file.name for file in files}, source):
        shutil.rmtree(partial)
        raise Unserved(why)


def download_files(partial: Path, folder: Path, source: str, files: list[RemoteFile]) -> None:
    """Downloads all files into the temporary folder. Raises OSError, HTTPException or Unfetchable."""
    total = sum(file.size for file in files)
    present = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
    print(
        f"fetching {source}: {len(files)} files, {total / 1e9:.2f} GB, of which {present / 1e9:.2f} GB are already downloaded",
        flush=True,
    )
    if total - present > shutil.disk_usage(partial).free and folder.exists() and os.environ.get("MAKE_ROOM"):
        print(f"the volume is too small for the old and the new model; deleting the old {folder} first", flush=True)
        shutil.rmtree(folder)
    if total - present > (free := shutil.disk_usage(partial).free):
        raise Unfetchable(
            f"{partial.parent} has {free / 1e9:.2f} GB free, but the download needs {(total - present) / 1e9:.2f} GB. Free space,"
            f" or use a larger volume.{' The old model stays until the new one is complete.' if folder.exists() else ''}"
        )
    for file in files:
        if not (partial / file.name).resolve().is_relative_to(partial.resolve()):
            raise Unfetchable(f"the path of the file {file.name} is outside of the model's folder")
    meter = Meter(total, present, sys.stdout)
    with meter.printed(), ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            for download in [pool.submit(fetch_file, file, partial / file.name, meter.count) for file in files]:
                download.result()
        finally:
            pool.shutdown(cancel_futures=True)


def publish(partial: Path, folder: Path) -> None:
    """Replaces the model's folder with the complete download.

    During the replacement, there is no folder for a moment. Open files of the old model stay readable.
    """
    former = folder.with_name(f".{folder.name}.former")
    shutil.rmtree(former, ignore_errors=True)
    if folder.exists():
        folder.rename(former)
    partial.rename(folder)
    shutil.rmtree(former, ignore_errors=True)
    print(f"{folder} is complete", flush=True)


def check_convertible(names: Iterable[str]) -> None:
    """Refuses a model before its download if the services could not read its tokenizer.

    Args:
        names: paths of the source's files in the model's folder.

    Raises:
        Unfetchable: the tokenizer needs a conversion, and this image has no transformers.
    """
    found = _convertible_files(names)
    if found and importlib.util.find_spec("transformers") is None:
        raise Unfetchable(
            f"the source has {', '.join(found)} but no {TOKENIZER_FILE}, and this image has no transformers to convert them. Set"
            f" modelCache.prefetch.image.repository to rootstock/worker, or add a {TOKENIZER_FILE} to the source."
        )


def complete(folder: Path) -> None:
    """Converts the tokenizer of a downloaded folder if it has no tokenizer.json. Raises Unfetchable if this fails."""
    if not _convertible_files(path.name for path in folder.iterdir()):
        return
    print("converting the tokenizer", flush=True)
    conversion = subprocess.run([sys.executable, "-m", CONVERTER, str(folder)], capture_output=True, text=True, check=False)
    if conversion.returncode:
        raise Unfetchable(
            conversion.stderr.strip().rpartition("\n")[2] or f"{CONVERTER} ended with status {conversion.returncode}"
        )


def _convertible_files(names: Iterable[str]) -> list[str]:
    """Returns the tokenizer files that transformers can convert; empty if there is a tokenizer.json."""
    present = set(names)
    if TOKENIZER_FILE in present:
        return []
    return sorted(name for name in present if "/" not in name and any(fnmatch(name, pattern) for pattern in VOCABULARIES))

"""Files to a folder: resumed, checked, and there all at once."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

from services.shared.fetch.conversion import check_convertible, complete
from services.shared.fetch.files import CHUNK, WANTED, File, Store, Unfetchable, Unserved
from services.shared.fetch.http_client import ask, patiently
from services.shared.observe.progress import Progress
from services.shared.served_config import refusal

AT_ONCE = 4  # files
CONFIG = "config.json"
BAR_S = 0.25  # between two looks of a bar


def fetch_file(file: File, target: Path, count: Callable[[int], None]) -> None:
    """To target, whole and checked; what a try has written stays for the next one. count: is told of bytes that are there.
    Raises OSError, and Unfetchable where they are not what the source says."""
    if target.is_file():  # checked before it was called so
        count(file.size)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    part.touch()
    count(part.stat().st_size)
    patiently(lambda: _go_on(file, part, count), lambda: part.stat().st_size)
    size = part.stat().st_size
    if fault := f"it has {size} bytes, not {file.size}" if size != file.size else file.wrong(part):
        part.unlink()
        raise Unfetchable(f"{file.name} is not what the source says: {fault}. It is fetched anew when this is started again.")
    part.rename(target)


def _go_on(file: File, part: Path, count: Callable[[int], None]) -> None:
    with part.open("ab") as out:
        held = out.tell()
        if held >= file.size:
            return
        with ask(file.url, {**file.headers(), **({"Range": f"bytes={held}-"} if held else {})}) as answer:
            if held and answer.status != 206:  # all of it again
                out.truncate(out.seek(0))
                count(-held)
            while chunk := answer.read1(CHUNK):
                out.write(chunk)
                out.flush()  # who goes on after a kill has it
                count(len(chunk))
        os.fsync(out.fileno())
        if out.tell() < file.size:
            raise ConnectionError(f"{file.name}: the connection ended at byte {out.tell()} of {file.size}")


class Meter:
    """Tells how far a download has come: a bar on a terminal, elsewhere a line every FETCH_REPORT_S seconds (5). Threads
    count."""

    def __init__(self, total: int, before: int, stream: TextIO) -> None:
        """Bytes; before: that were there when it began, and are counted as they are found."""
        self._total, self._held, self._begun = total, 0, time.monotonic()
        self._before = before
        self._stream = stream
        self._lock = threading.Lock()

    def count(self, size: int) -> None:
        with self._lock:
            self._held += size

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        ended = threading.Event()
        teller = threading.Thread(target=self._tell, args=(ended,))
        teller.start()
        try:
            yield
        finally:
            ended.set()
            teller.join()

    def _tell(self, ended: threading.Event) -> None:
        is_tty = self._stream.isatty()
        every_s = BAR_S if is_tty else float(os.environ.get("FETCH_REPORT_S", "5"))
        while not ended.wait(every_s):
            come = Progress("fetch", self._held, self._total, time.monotonic() - self._begun, before=self._before)
            bar = come.bar()[: shutil.get_terminal_size().columns - 1]
            self._stream.write(f"\r{bar}\x1b[K" if is_tty else f"{come.line()}\n")
            self._stream.flush()
        if is_tty:
            self._stream.write("\r\x1b[K")


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One at a time, of those who share a node's disk."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for who fetches {folder}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # of some network file systems, where a Job is the only one that writes
            print(f"{folder} cannot be locked: {error}", flush=True)
        yield


def fetch(folder: Path, source: str, store: Store) -> None:
    """Raises OSError and Unfetchable. What is in the folder is replaced once the model is whole, in a folder beside it."""
    with alone(folder):
        mark, wanted = folder / store.mark, store.wanted
        if mark.is_file() and mark.read_text() == wanted:
            print(f"{folder} has {source}", flush=True)
            return
        files = store.files()
        if not files:
            raise Unfetchable(f"there are none of the files {', '.join(WANTED)}")
        check_convertible(file.name for file in files)
        versions = "\n".join((source, *sorted(f"{file.name} {file.version}" for file in files)))
        key = hashlib.sha256(versions.encode()).hexdigest()[:12]
        partial = folder.with_name(f".{folder.name}.{key}.partial")
        mine = re.compile(rf"\.{re.escape(folder.name)}\.[0-9a-f]{{12}}\.partial")  # not of a folder whose name begins so
        for other in list(folder.parent.iterdir()):
            if mine.fullmatch(other.name) and other != partial:
                shutil.rmtree(other)
        partial.mkdir(exist_ok=True)
        refuse_by_config(partial, source, files)
        fill(partial, folder, source, files)
        if store.wanted != wanted:
            raise Unfetchable("it has changed meanwhile. It is fetched anew when this is started again.")
        complete(partial)
        (partial / store.mark).write_text(wanted)
        publish(partial, folder)


def refuse_by_config(partial: Path, source: str, files: list[File]) -> None:
    """Reads config.json before all else, so that nothing large is downloaded for a model that no worker serves. Raises Unserved,
    and leaves nothing behind then; Unfetchable, OSError."""
    about = next((file for file in files if file.name == CONFIG), None)
    if about is None:
        return
    fetch_file(about, partial / CONFIG, lambda _: None)
    try:
        config = json.loads((partial / CONFIG).read_bytes())
    except (ValueError, RecursionError):  # the worker says so
        return
    if why := refusal(config, {file.name for file in files}, source):
        shutil.rmtree(partial)
        raise Unserved(why)


def fill(partial: Path, folder: Path, source: str, files: list[File]) -> None:
    total = sum(file.size for file in files)
    held = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
    print(f"fetching {source}: {len(files)} files, {total / 1e9:.2f} GB, of which {held / 1e9:.2f} are there", flush=True)
    if total - held > shutil.disk_usage(partial).free and folder.exists() and os.environ.get("MAKE_ROOM"):
        print(f"there is no room for both: what {folder} has goes first", flush=True)
        shutil.rmtree(folder)
    if total - held > (free := shutil.disk_usage(partial).free):
        raise Unfetchable(
            f"{partial.parent} has {free / 1e9:.2f} GB free, too little. What it takes the place of stays until then."
        )
    for file in files:
        if not (partial / file.name).resolve().is_relative_to(partial.resolve()):
            raise Unfetchable(f"a file {file.name} would lie outside of its folder")
    meter = Meter(total, held, sys.stdout)
    with meter.told(), ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            for done in [pool.submit(fetch_file, file, partial / file.name, meter.count) for file in files]:
                done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def publish(partial: Path, folder: Path) -> None:
    """Whoever reads the folder finds one model, or none for a moment, or the other. Open files of the former can be read on."""
    former = folder.with_name(f".{folder.name}.former")
    shutil.rmtree(former, ignore_errors=True)
    if folder.exists():
        folder.rename(former)
    partial.rename(folder)
    shutil.rmtree(former, ignore_errors=True)
    print(f"{folder} is whole", flush=True)

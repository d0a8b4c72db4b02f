"""python -c … FOLDER SOURCE …: downloads each hub id into its folder and marks it whole.

SOURCE: a hub id, with @revision for one that is not the newest. HF_TOKEN, if set, opens gated ones. What is whole already stays.
How far a download has come is printed every PREFETCH_REPORT_S seconds (5), by what lies in the folder.
"""

import os
import sys
import threading
import time
from fnmatch import fnmatch
from pathlib import Path

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # bars are for terminals
from huggingface_hub import HfApi, snapshot_download

WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]  # no pickles

EVERY_S = float(os.environ.get("PREFETCH_REPORT_S", "5"))


def total_bytes(name: str, revision: str | None) -> int:
    """Of the files that are wanted, as the hub tells."""
    files = HfApi().model_info(name, revision=revision, files_metadata=True).siblings or ()
    return sum(file.size or 0 for file in files if any(fnmatch(file.rfilename, each) for each in WANTED))


def held_bytes(folder: Path) -> int:
    """Files that are being downloaded lie below the folder too. One may go while it is looked at: it is moved to its place."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def report(folder: Path, before: int, total: int, ended: threading.Event) -> None:
    begun = time.monotonic()
    while not ended.wait(EVERY_S):
        held, passed = held_bytes(folder), time.monotonic() - begun
        rate = (held - before) / passed
        left = f", {max(total - held, 0) / rate:.0f} s left" if rate > 0 else ""
        share = f"{min(100 * held // total, 100)} %, " if total else ""
        print(f"{share}{held / 1e9:.2f} of {total / 1e9:.2f} GB, {rate / 1e9:.2f} GB/s{left}", flush=True)


def prefetch(folder: Path, source: str) -> None:
    mark = folder / ".source"
    if mark.is_file() and mark.read_text() == source:
        print(f"{source} is in {folder}", flush=True)
        return
    mark.unlink(missing_ok=True)
    name, _, revision = source.partition("@")
    total, ended = total_bytes(name, revision or None), threading.Event()
    print(f"downloading {source} to {folder}: {total / 1e9:.2f} GB", flush=True)
    reporter = threading.Thread(target=report, args=(folder, held_bytes(folder), total, ended))
    reporter.start()
    try:
        snapshot_download(name, revision=revision or None, local_dir=folder, allow_patterns=WANTED)
    finally:
        ended.set()
        reporter.join()
    mark.write_text(source)


for folder, source in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    prefetch(Path(folder), source)

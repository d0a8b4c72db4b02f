"""python -c … FOLDER SOURCE: returns when FOLDER has the complete model.

SOURCE is the download source of the prefetch Job, which writes SOURCE to FOLDER/.source as its last step; "" without a Job.
Without a Job, the script ends with a message if the tokenizer in the folder must be converted.
"""

import signal
import sys
import time
from pathlib import Path

PERIOD_S = 2.0  # seconds between two checks
MAX_STILL = 5  # number of checks without a change of the folder, after which the copy into the folder counts as complete
VOCABULARIES = ("*.model", "*.tiktoken", "merges.txt", "tekken.json", "vocab.json", "vocab.txt")  # as in hf_tokenizer.py


def is_whole(folder: Path, source: str) -> bool:
    if source:
        mark = folder / ".source"
        return mark.is_file() and mark.read_text() == source
    return (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file()


def unconverted(folder: Path) -> list[str]:
    """Returns the names of the files from which a tokenizer.json can be made; empty while config.json is missing."""
    if not (folder / "config.json").is_file():
        return []
    return sorted({path.name for pattern in VOCABULARIES for path in folder.glob(pattern)})


def sizes(folder: Path) -> list[tuple[str, int]] | None:
    """Returns each path below the folder with its size in bytes. None if a file was moved during the call."""
    try:
        return sorted((str(path), path.stat().st_size) for path in folder.rglob("*"))
    except OSError:
        return None


signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # without a handler, SIGTERM does not end the first process of a container
folder, source = Path(sys.argv[1]), sys.argv[2]
still, former = 0, None
while not is_whole(folder, source):
    print(f"waiting for {source or 'config.json and tokenizer.json'} in {folder}", flush=True)
    if not source and (names := unconverted(folder)):
        present = sizes(folder)
        still = still + 1 if present is not None and present == former else 0
        former = present
        if still == MAX_STILL:
            sys.exit(
                f"{folder} has {', '.join(names)} but no tokenizer.json. Convert them on a machine with transformers:"
                f" `python -m rootstock_llm.services.worker.text.convert_tokenizer {folder}`."
            )
    time.sleep(PERIOD_S)

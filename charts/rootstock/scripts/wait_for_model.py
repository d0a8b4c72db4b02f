"""python -c … FOLDER SOURCE: returns once the model is in FOLDER.

SOURCE: what the prefetch Job downloads into it, whose last act is to write this into FOLDER/.source; "" where no Job does.
"""

import signal
import sys
import time
from pathlib import Path

PERIOD_S = 2.0


def is_whole(folder: Path, source: str) -> bool:
    if source:
        mark = folder / ".source"
        return mark.is_file() and mark.read_text() == source
    return (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file()


signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a container's first process is not ended by it otherwise
folder, source = Path(sys.argv[1]), sys.argv[2]
while not is_whole(folder, source):
    print(f"waiting for {source or 'config.json and tokenizer.json'} in {folder}", flush=True)
    time.sleep(PERIOD_S)

"""Makes the tokenizer.json of a fetched model that has its tokenizer in another form, if this image has transformers."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from services.shared.fetch.files import Unfetchable
from services.shared.hf_tokenizer import TOKENIZER_FILE, VOCABULARIES

CONVERTER = "services.worker.text.convert_tokenizer"  # in a process of its own: only the worker's image has it


def check_convertible(names: Iterable[str]) -> None:
    """Refuses a model before its download if services could not read its tokenizer.

    Args:
        names: Names of the source's files, relative to the model's folder.

    Raises:
        Unfetchable: The tokenizer needs a conversion, and this image has no transformers.
    """
    found = _unconverted(names)
    if found and importlib.util.find_spec("transformers") is None:
        raise Unfetchable(
            f"it has {', '.join(found)} and no {TOKENIZER_FILE}, and this image has no transformers, which makes one. Set"
            f" modelCache.prefetch.image.repository to rootstock/worker, or add a {TOKENIZER_FILE} to the source."
        )


def complete(folder: Path) -> None:
    """Writes tokenizer.json into a downloaded folder that needs one. Raises Unfetchable with the converter's reason."""
    if not _unconverted(path.name for path in folder.iterdir()):
        return
    print("converting the tokenizer", flush=True)
    done = subprocess.run([sys.executable, "-m", CONVERTER, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unfetchable(done.stderr.strip().rpartition("\n")[2] or f"{CONVERTER} ended with status {done.returncode}")


def _unconverted(names: Iterable[str]) -> list[str]:
    """Returns the files from which transformers makes a tokenizer.json. Empty if there is one already."""
    present = set(names)
    if TOKENIZER_FILE in present:
        return []
    return sorted(name for name in present if "/" not in name and any(fnmatch(name, pattern) for pattern in VOCABULARIES))

"""Adds tokenizer.json to a model folder that lacks it: makes a copy of the folder with links to its files, and converts there.

This module does not import transformers, so that the launcher starts quickly.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from hashlib import blake2b
from pathlib import Path

from rootstock_llm.services.shared.hf_tokenizer import TOKENIZER_FILE, vocabulary_files

CONVERTER = "rootstock_llm.services.worker.text.convert_tokenizer"  # runs in a separate process, because it imports transformers
BUILT = Path("build") / "models"


def with_tokenizer(folder: Path, built: Path = BUILT) -> Path:
    """Returns a folder with tokenizer.json: the folder itself, or a copy below `built` with the converted tokenizer.

    A folder that has neither tokenizer.json nor files to convert is returned unchanged.

    Raises:
        ValueError: transformers cannot convert the tokenizer. The message has the reason and the remedy.
    """
    source = folder.resolve()
    files = vocabulary_files(source)
    if (source / TOKENIZER_FILE).is_file() or not files:
        return folder
    file_times = [(name, (source / name).stat().st_mtime_ns) for name in files]
    target = built / f"{source.name}-{blake2b(repr((str(source), file_times)).encode(), digest_size=6).hexdigest()}"
    if not (target / TOKENIZER_FILE).is_file():
        print(f"  converting the tokenizer of {folder} ({', '.join(files)})", flush=True)
        built.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built) as made:
            _convert(source, Path(made))
            for path in source.iterdir():
                if not Path(made, path.name).exists():
                    Path(made, path.name).symlink_to(path.resolve())
            Path(made).rename(target)
            Path(made).mkdir()  # made again, because TemporaryDirectory removes the folder at the end of the block
    return target


def _convert(source: Path, out: Path) -> None:
    done = subprocess.run([sys.executable, "-m", CONVERTER, str(source), str(out)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(done.stderr.strip().rpartition("\n")[2] or f"{CONVERTER} ended with status {done.returncode}")

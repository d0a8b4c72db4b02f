"""python -c … FOLDER SOURCE …: downloads each hub id into its folder and marks it whole.

SOURCE: a hub id, with @revision for one that is not the newest. HF_TOKEN, if set, opens gated ones. What is whole already stays.
"""

import sys
from pathlib import Path

from huggingface_hub import snapshot_download

WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]  # no pickles


def prefetch(folder: Path, source: str) -> None:
    mark = folder / ".source"
    if mark.is_file() and mark.read_text() == source:
        print(f"{source} is in {folder}", flush=True)
        return
    mark.unlink(missing_ok=True)
    name, _, revision = source.partition("@")
    print(f"downloading {source} to {folder}", flush=True)
    snapshot_download(name, revision=revision or None, local_dir=folder, allow_patterns=WANTED)
    mark.write_text(source)


for folder, source in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    prefetch(Path(folder), source)

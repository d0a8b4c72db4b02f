"""What makes equal tokens mean equal KV on two workers: the model's name, its weights, its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash

from services.shared.block_hash import root_hash
from services.shared.served_name import served_name

TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """model: the name that clients use. revision, tokenizer: fingerprints, hex."""

    model: str
    revision: str
    tokenizer: str

    def root_hash(self, namespace: str) -> bytes:
        """What the first block of a prompt in this namespace (adapter and cache salt) is chained to."""
        return root_hash(self.model, self.revision, self.tokenizer, namespace)


def identify_model(folder: str | Path, given: str = "") -> ModelIdentity:
    """given: the name that clients use, "" for the folder's own. Raises OSError if config.json or tokenizer.json is not there."""
    path = Path(folder)
    tokenizer = xxhash.xxh3_64_hexdigest((path / "tokenizer.json").read_bytes())
    return ModelIdentity(served_name(folder, given), _revision(path), tokenizer)


def _revision(folder: Path) -> str:
    """Of config.json and, for each file of weights, its name, its size and its last TAIL_BYTES: quick for any size, and weights
    that were trained further differ there."""
    chain = xxhash.xxh3_64((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        chain.update(f"\n{file.name} {size}\n".encode())
        with file.open("rb") as weights:
            weights.seek(max(0, size - TAIL_BYTES))
            chain.update(weights.read())
    return chain.hexdigest()

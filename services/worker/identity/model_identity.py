"""What makes equal tokens mean equal KV on two workers: the model's name, its weights, its tokenizer.

ServedWeights is the one owner of a worker's identity. It is made when the model is loaded and replaced on the loop's thread
when other weights are resumed; whoever keeps something by it is told there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from services.shared.index.block_hash import root_hash
from services.shared.sampling_defaults import SamplingDefaults
from services.shared.settings import served_name
from services.worker.core.contracts.tree_name import parts_of
from services.worker.identity.weights_revision import WeightsReading


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """model: the name that clients use. revision, tokenizer: fingerprints, hex."""

    model: str
    revision: str
    tokenizer: str

    def root_hash(self, namespace: str) -> bytes:
        """What the first block of a prompt in this namespace (adapter and cache salt) is chained to."""
        return root_hash(self.model, self.revision, self.tokenizer, namespace)


class ServedWeights:
    """identity: read by any thread. defaults: reads what comes with weights, of requests that leave parameters out; raises
    ValueError, OSError. on_replaced: called on the loop's thread with both, before anything is computed with the new weights;
    must not block. reload_s: seconds that loading them again took the last time, None where it has not happened."""

    def __init__(self, folder: str | Path, identity: ModelIdentity, defaults: Callable[[], SamplingDefaults]) -> None:
        self._folder = Path(folder)
        self.identity = identity
        self.defaults = defaults
        self.on_replaced: Callable[[ModelIdentity, SamplingDefaults], None] = lambda identity, defaults: None
        self.reload_s: float | None = None

    def reading(self) -> WeightsReading:
        """Of the folder as it is; to be entered before it is loaded again."""
        return WeightsReading(self._folder)

    def replaced(self, revision: str, defaults: SamplingDefaults) -> None:
        """The worker computes with these from here on. Name and tokenizer stay: both were read at the start."""
        self.identity = replace(self.identity, revision=revision)
        self.on_replaced(self.identity, defaults)

    def tree_root(self, tree: str) -> bytes:
        """What the first block in this tree of cached prefixes is chained to; a tree's name says which weights it is of."""
        revision, namespace = parts_of(tree)
        return replace(self.identity, revision=revision).root_hash(namespace)


def identify_model(folder: str | Path, given: str, revision: str) -> ModelIdentity:
    """given: the name that clients use, "" for the folder's own. Raises OSError if tokenizer.json is not there."""
    tokenizer = xxhash.xxh3_64_hexdigest((Path(folder) / "tokenizer.json").read_bytes())
    return ModelIdentity(served_name(folder, given), revision, tokenizer)

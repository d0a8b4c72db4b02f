"""The identity of a served model: name, weights and tokenizer. If it is equal on two workers, equal tokens have equal KV.

ServedWeights is the only owner of a worker's identity. It is created when the model is loaded, and changes on the loop's thread
when other weights are resumed; it then informs the users of the identity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from rootstock_llm.services.shared.index.prefix_index import root_hash
from rootstock_llm.services.shared.sampling_parameters import SamplingDefaults
from rootstock_llm.services.shared.settings import served_name
from rootstock_llm.services.worker.core.kv.radix_cache import parts_of
from rootstock_llm.services.worker.identity.weights_revision import WeightsReading


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Name and fingerprints of a model."""

    model: str  # name that clients use
    revision: str  # fingerprint of the weights, hexadecimal
    tokenizer: str  # fingerprint of the tokenizer, hexadecimal


class ServedWeights:
    """The present weights of a worker."""

    def __init__(self, folder: str | Path, identity: ModelIdentity, defaults: Callable[[], SamplingDefaults]) -> None:
        """Starts with the weights that were loaded first.

        Args:
            folder: the model folder.
            identity: identity of these weights. Any thread may read the attribute.
            defaults: reads the sampling defaults that come with the weights. It raises ValueError or OSError.
        """
        self._folder = Path(folder)
        self.identity = identity
        self.defaults = defaults
        # Called on the loop's thread before anything is computed with new weights. It must not block.
        self.on_replaced: Callable[[ModelIdentity, SamplingDefaults], None] = lambda identity, defaults: None
        self.reload_s: float | None = None  # seconds of the last reload; unset before the first one

    def reading(self) -> WeightsReading:
        """Returns a reader of the folder, to be entered before the weights are loaded again."""
        return WeightsReading(self._folder)

    def replaced(self, revision: str, defaults: SamplingDefaults) -> None:
        """Records new weights, with which the worker computes from now on.

        Name and tokenizer do not change, because they are read only at the start.
        """
        self.identity = replace(self.identity, revision=revision)
        self.on_replaced(self.identity, defaults)

    def tree_root(self, tree: str) -> bytes:
        """Returns the hash that precedes the first block of a tree. The tree's name has the revision of its weights."""
        revision, namespace = parts_of(tree)
        return root_hash(self.identity.model, revision, self.identity.tokenizer, namespace)


def identify_model(folder: str | Path, given: str, revision: str) -> ModelIdentity:
    """Returns the identity of a model.

    Args:
        folder: the model folder.
        given: name that clients use; the folder's name if it is empty.
        revision: fingerprint of the weights.

    Raises:
        OSError: the folder has no tokenizer.json.
    """
    tokenizer = xxhash.xxh3_64_hexdigest((Path(folder) / "tokenizer.json").read_bytes())
    return ModelIdentity(served_name(folder, given), revision, tokenizer)

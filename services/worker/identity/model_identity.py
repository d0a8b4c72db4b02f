"""The identity of a served model: name, weights and tokenizer. Workers with equal identities have equal KV for equal tokens.

ServedWeights is the only owner of a worker's identity. It is created when the model is loaded. If ResumeMemory loads other
weights, ServedWeights changes its identity on the scheduler loop's thread and calls on_replaced().
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
    """The weights that a worker computes with."""

    def __init__(
        self, folder: str | Path, identity: ModelIdentity, defaults: Callable[[], SamplingDefaults], form: bytes = b""
    ) -> None:
        """Stores the identity of the weights that were loaded when the worker started.

        Args:
            folder: the model folder.
            identity: identity of the loaded weights. Any thread may read the attribute `identity`.
            defaults: returns the sampling defaults from the folder's files. Raises ValueError or OSError.
            form: result of weight_form().
        """
        self._folder, self._form = Path(folder), form
        self.identity = identity
        self.defaults = defaults
        # Called on the scheduler loop's thread before the first step with new weights. Must not block.
        self.on_replaced: Callable[[ModelIdentity, SamplingDefaults], None] = lambda identity, defaults: None
        self.reload_s: float | None = None  # seconds of the last reload; None: the weights were never reloaded

    def reading(self) -> WeightsReading:
        """Returns a context manager that hashes the folder. The caller must load the weights inside its block."""
        return WeightsReading(self._folder, self._form)

    def replaced(self, revision: str, defaults: SamplingDefaults) -> None:
        """Records new weights: changes the identity and calls on_replaced().

        Name and tokenizer stay the same, because they are read only when the worker starts.
        """
        self.identity = replace(self.identity, revision=revision)
        self.on_replaced(self.identity, defaults)

    def tree_root(self, tree: str) -> bytes:
        """Returns the root hash of a radix tree, from which the hash of its first block is computed.

        Args:
            tree: the tree's name, which contains the revision of the weights.
        """
        revision, namespace = parts_of(tree)
        return root_hash(self.identity.model, revision, self.identity.tokenizer, namespace)


def identify_model(folder: str | Path, given: str, revision: str) -> ModelIdentity:
    """Returns the identity of a model.

    Args:
        folder: the model folder.
        given: name that clients use; empty: the folder's name.
        revision: fingerprint of the weights.

    Raises:
        OSError: the folder has no tokenizer.json.
    """
    tokenizer = xxhash.xxh3_64_hexdigest((Path(folder) / "tokenizer.json").read_bytes())
    return ModelIdentity(served_name(folder, given), revision, tokenizer)

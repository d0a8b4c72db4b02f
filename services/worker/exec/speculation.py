"""Chooses, loads and owns the drafter of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rootstock_llm.services.worker.core.contracts.plan import I32
from rootstock_llm.services.worker.exec.contracts.causal_model import CausalModel
from rootstock_llm.services.worker.exec.contracts.drafter import BETWEEN_TEXTS, Drafter, DraftModel, Kept
from rootstock_llm.services.worker.exec.contracts.operations import ReleaseMemory
from rootstock_llm.services.worker.exec.contracts.options import DRAFT, EAGLE3, MTP, NGRAM, NONE, DeviceOptions
from rootstock_llm.services.worker.exec.drafting.model_drafter import MOST_PENDING, ModelDrafter
from rootstock_llm.services.worker.exec.drafting.ngram import NgramDrafter
from rootstock_llm.services.worker.exec.drafting.ngram_index import NgramIndex
from rootstock_llm.services.worker.exec.models.dense import Decoder
from rootstock_llm.services.worker.exec.models.drafts import DecoderDraftModel, HeadDraftModel, load_eagle3, load_mtp
from rootstock_llm.services.worker.exec.models.loaded_model import LoadedModel
from rootstock_llm.services.worker.exec.pools import kv_pool
from rootstock_llm.services.worker.exec.pools.kv_pool import NO_POOL, KVPool, LayerKV
from rootstock_llm.services.worker.exec.streams.cuda_streams import Streams
from rootstock_llm.services.worker.exec.weights.checkpoint import CheckpointError, UnsupportedModel
from rootstock_llm.services.worker.exec.weights.load_progress import LoadPhases
from rootstock_llm.services.worker.exec.weights.load_request import LoadRequest

ModelLoader = Callable[[LoadRequest], LoadedModel]


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A loaded draft model, or the sizes of a drafter without a model."""

    model: DraftModel | None = None  # the model, or None for a drafter without one
    kept: tuple[int, ...] = ()  # layers of the target whose inputs the draft model reads, see aux_layers of Decoder
    kv_bytes_per_token: int = 0
    weight_bytes: int = 0

    @property
    def shape(self) -> tuple[object, ...]:
        """The values on which the sizes of pools and passes depend."""
        return (self.kept, *(() if self.model is None else (self.model.shift, self.model.layers, self.model.max_context)))


NO_DRAFT = LoadedDraft()


def load_draft(request: LoadRequest, target: LoadedModel, options: DeviceOptions, load: ModelLoader) -> LoadedDraft:
    """Loads the draft model that the options name.

    Args:
        request: the target's load request.
        target: the loaded target.
        load: loads a separate model.

    Raises:
        CheckpointError: the draft model's files are missing or broken.
        UnsupportedModel: the model cannot draft for the target.
        ValueError: a setting is missing, unknown, or has no effect with the algorithm.
    """
    algorithm, path = options.speculative_algorithm if options.max_drafts else NONE, options.draft_model
    if algorithm in (DRAFT, EAGLE3) and not path:
        beside = f"{request.folder.name}-{algorithm}"
        raise ValueError(
            f"--speculative-algorithm {algorithm} needs --speculative-draft-model-path, or a folder {beside} next to the model's"
        )
    if path and algorithm in (NONE, NGRAM):
        raise ValueError(f"--speculative-draft-model-path has no effect with --speculative-algorithm {algorithm}. Remove it.")
    if algorithm in (NONE, NGRAM):
        return NO_DRAFT
    if algorithm not in (DRAFT, EAGLE3, MTP):
        raise ValueError(f"--speculative-algorithm {algorithm} is unknown")
    with request.phases.timed("draft"):
        if algorithm == DRAFT:
            dtype = str(target.dtype).removeprefix("torch.")  # the dtype of the pools
            own = replace(request, folder=Path(path), dtype=dtype, context_len=target.context_len, phases=LoadPhases())
            return _small(own.folder, load(own), target)
        return _head(request, target, Path(path) if path else request.folder, algorithm)


def _small(folder: Path, loaded: LoadedModel, target: LoadedModel) -> LoadedDraft:
    if not isinstance(loaded.model, Decoder) or not loaded.generates:
        raise UnsupportedModel(f"{folder} cannot draft: it is not a generating model with this worker's own decoder")
    if loaded.config.vocab_size < target.config.vocab_size:
        raise UnsupportedModel(
            f"{folder} cannot draft: it has {loaded.config.vocab_size} tokens and the model {target.config.vocab_size}"
        )
    model = DecoderDraftModel(loaded.model, loaded.layers, loaded.context_len, int(target.config.vocab_size))
    return LoadedDraft(model, (), loaded.kv_bytes_per_token, loaded.weight_bytes)


def _head(request: LoadRequest, target: LoadedModel, folder: Path, algorithm: str) -> LoadedDraft:
    decoder = target.model
    if not isinstance(decoder, Decoder):
        raise UnsupportedModel(f"--speculative-algorithm {algorithm} is for models of our own decoder: it reads their states")
    load = load_eagle3 if algorithm == EAGLE3 else load_mtp
    head = load(folder, decoder, target.dtype, target.kernels)
    if request.target.device.type == "cuda":
        torch.cuda.synchronize(request.target.device)  # other streams read the head's weights
    model = HeadDraftModel(head, target.kernels, target.context_len)
    size = kv_pool.bytes_per_token(model.layers, target.dtype)
    return LoadedDraft(model, head.aux_layers, size, head.num_bytes(decoder))


def _index_of(corpus: I32, vocab_size: int) -> NgramIndex:
    """Returns an index of the corpus. Replaces tokens without a row in the model by BETWEEN_TEXTS, in place.

    A copy of the corpus would stay in memory as long as the original.
    """
    np.copyto(corpus, BETWEEN_TEXTS, where=corpus >= vocab_size)
    return NgramIndex(corpus)


class Drafting:
    """Owns the draft model, its pool and the drafter of an executor, also while their memory is released and resumed."""

    def __init__(self, loaded: LoadedDraft, corpus: I32 | None = None) -> None:
        """Takes the draft model.

        Args:
            corpus: see DeviceOptions.draft_corpus.
        """
        self._corpus = corpus
        self.weight_bytes = loaded.weight_bytes
        self._drafter: ModelDrafter | None = None
        self._model, self.layers = loaded.model, loaded.model.layers if loaded.model is not None else ()
        self.kept, self.kv_bytes_per_token, self._shape = loaded.kept, loaded.kv_bytes_per_token, loaded.shape
        self.pool = NO_POOL

    def allocate(self, pool: Callable[[tuple[LayerKV, ...]], KVPool]) -> None:
        """Allocates the draft model's keys and values.

        Args:
            pool: returns a pool for the given layers, with the number of pages of the target's pool.
        """
        if self.layers:
            self.pool = pool(self.layers)
            if self._drafter is not None:
                self._drafter.pool = self.pool

    def drafter(self, table: Tensor, page_size: int, vocab_size: int, streams: Streams) -> Drafter:
        """Returns the drafter. A model drafter gets its pool from the next allocate().

        Args:
            table: int32[slots, pages], the target's page table.
            vocab_size: of the target.
        """
        if self._model is None:
            return NgramDrafter(None if self._corpus is None else _index_of(self._corpus, vocab_size))
        self._drafter = ModelDrafter(self._model, self.pool, table, page_size, vocab_size, streams)
        return self._drafter

    def read(self, target: CausalModel, num_tokens: int) -> Kept:
        """Returns the hidden states that the draft model reads, for the first num_tokens tokens of the target's last pass."""
        if not self.kept:
            return ()
        assert isinstance(target, Decoder), "a head reads states of our own decoder"
        return target.aux_states(num_tokens)

    def rehearse(self, target: CausalModel, num_tokens: int) -> None:
        """Runs a pass of the draft model after a pass of the target with num_tokens tokens. Called on the forward stream."""
        if self._drafter is not None:
            self._drafter.rehearse(num_tokens, self.read(target, num_tokens))

    def waiting(self, target: CausalModel, num_slots: int) -> Kept:
        """Allocates the largest hidden states that num_slots slots may store while no draft tokens are requested."""
        return tuple(each.new_empty((num_slots * MOST_PENDING, each.shape[1])) for each in self.read(target, 1))

    def drop(self, parts: ReleaseMemory) -> None:
        self._model = None if parts.weights else self._model
        self.pool = NO_POOL if parts.kv else self.pool
        if self._drafter is not None:
            self._drafter.drop(model=parts.weights, pool=parts.kv)

    def loaded_again(self, draft: LoadedDraft) -> None:
        """Takes a draft model that was loaded again. Raises CheckpointError if its shape differs from the first one's."""
        if draft.shape != self._shape:
            raise CheckpointError("the draft model that was loaded again has another shape than the first one")
        self._model = draft.model
        if self._drafter is not None:
            self._drafter.model = self._model

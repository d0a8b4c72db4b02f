"""What drafts for a model: chosen, loaded, given its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from services.worker.core.contracts.plan import I32
from services.worker.exec.contracts.causal_model import CausalModel
from services.worker.exec.contracts.draft_model import DraftModel
from services.worker.exec.contracts.drafter import BETWEEN_TEXTS, Drafter, Kept
from services.worker.exec.contracts.operations import ReleaseMemory
from services.worker.exec.contracts.options import DRAFT, EAGLE3, MTP, NGRAM, NONE, DeviceOptions
from services.worker.exec.drafting.model_drafter import MOST_PENDING, ModelDrafter
from services.worker.exec.drafting.ngram import NgramDrafter
from services.worker.exec.drafting.ngram_index import NgramIndex
from services.worker.exec.models.decoder import Decoder
from services.worker.exec.models.drafts import DecoderDraftModel, HeadDraftModel, load_eagle3, load_mtp
from services.worker.exec.models.loaded_model import LoadedModel
from services.worker.exec.pools import kv_pool
from services.worker.exec.pools.kv_pool import NO_POOL, KVPool, LayerKV
from services.worker.exec.streams.cuda_streams import Streams
from services.worker.exec.weights.checkpoint import CheckpointError, UnsupportedModel
from services.worker.exec.weights.load_progress import LoadPhases
from services.worker.exec.weights.load_request import LoadRequest

ModelLoader = Callable[[LoadRequest], LoadedModel]


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """model: None for who drafts without one. kept: layers of the target whose input it reads, see Decoder."""

    model: DraftModel | None = None
    kept: tuple[int, ...] = ()
    kv_bytes_per_token: int = 0
    weight_bytes: int = 0

    @property
    def shape(self) -> tuple[object, ...]:
        """What pools and passes are sized by."""
        return (self.kept, *(() if self.model is None else (self.model.shift, self.model.layers, self.model.max_context)))


NO_DRAFT = LoadedDraft()


def load_draft(request: LoadRequest, target: LoadedModel, options: DeviceOptions, load: ModelLoader) -> LoadedDraft:
    """request: of the target, which is loaded. load: for a model of its own. Raises CheckpointError, UnsupportedModel, and
    ValueError for a setting that is missing or means nothing."""
    algorithm, path = options.speculative_algorithm if options.max_drafts else NONE, options.draft_model
    if algorithm in (DRAFT, EAGLE3) and not path:
        beside = f"{request.folder.name}-{algorithm}"
        raise ValueError(
            f"--speculative-algorithm {algorithm} needs --speculative-draft-model-path, or {beside} beside the model's folder"
        )
    if path and algorithm in (NONE, NGRAM):
        raise ValueError(f"--speculative-draft-model-path means nothing to --speculative-algorithm {algorithm}")
    if algorithm in (NONE, NGRAM):
        return NO_DRAFT
    if algorithm not in (DRAFT, EAGLE3, MTP):
        raise ValueError(f"there is no speculative algorithm {algorithm}")
    with request.phases.timed("draft"):
        if algorithm == DRAFT:
            dtype = str(target.dtype).removeprefix("torch.")  # as the pools have it
            own = replace(request, folder=Path(path), dtype=dtype, context_len=target.context_len, phases=LoadPhases())
            return _small(own.folder, load(own), target)
        return _head(request, target, Path(path) if path else request.folder, algorithm)


def _small(folder: Path, loaded: LoadedModel, target: LoadedModel) -> LoadedDraft:
    if not isinstance(loaded.model, Decoder) or not loaded.generates:
        raise UnsupportedModel(f"{folder} cannot draft: it is none of the decoders that are our own")
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
        torch.cuda.synchronize(request.target.device)  # other streams read it
    model = HeadDraftModel(head, target.kernels, target.context_len)
    size = kv_pool.bytes_per_token(model.layers, target.dtype)
    return LoadedDraft(model, head.aux_layers, size, head.num_bytes(decoder))


def _index_of(corpus: I32, vocab_size: int) -> NgramIndex:
    """A tokenizer may know tokens that its model has no row for. They are replaced where they stand: a second array would be kept
    as long as the first."""
    np.copyto(corpus, BETWEEN_TEXTS, where=corpus >= vocab_size)
    return NgramIndex(corpus)


class Drafting:
    """What an executor drafts with, from when its model is loaded until its memory is given back and taken again. layers: of
    which it keeps KV, in the pages of `pool`. corpus: see DeviceOptions."""

    def __init__(self, loaded: LoadedDraft, corpus: I32 | None = None) -> None:
        self._corpus = corpus
        self.weight_bytes = loaded.weight_bytes
        self._drafter: ModelDrafter | None = None
        self._model, self.layers = loaded.model, loaded.model.layers if loaded.model is not None else ()
        self.kept, self.kv_bytes_per_token, self._shape = loaded.kept, loaded.kv_bytes_per_token, loaded.shape
        self.pool = NO_POOL

    def allocate(self, pool: Callable[[tuple[LayerKV, ...]], KVPool]) -> None:
        """pool: of as many pages as the target's."""
        if self.layers:
            self.pool = pool(self.layers)
            if self._drafter is not None:
                self._drafter.pool = self.pool

    def drafter(self, table: Tensor, page_size: int, vocab_size: int, streams: Streams) -> Drafter:
        """Its pool is that of the next allocate(). table: int32[slots, pages]. vocab_size: of the target."""
        if self._model is None:
            return NgramDrafter(None if self._corpus is None else _index_of(self._corpus, vocab_size))
        self._drafter = ModelDrafter(self._model, self.pool, table, page_size, vocab_size, streams)
        return self._drafter

    def read(self, target: CausalModel, num_tokens: int) -> Kept:
        """What the target, the model that steps run, has kept of the first tokens of its last pass."""
        if not self.kept:
            return ()
        assert isinstance(target, Decoder), "a head reads states of our own decoder"
        return target.aux_states(num_tokens)

    def rehearse(self, target: CausalModel, num_tokens: int) -> None:
        """A pass of a model that drafts behind one of the target's, of as many tokens. On the forward stream."""
        if self._drafter is not None:
            self._drafter.rehearse(num_tokens, self.read(target, num_tokens))

    def waiting(self, target: CausalModel, num_slots: int) -> Kept:
        """As much as slots whose answers nobody guesses at have kept at most, before it is computed."""
        return tuple(each.new_empty((num_slots * MOST_PENDING, each.shape[1])) for each in self.read(target, 1))

    def drop(self, parts: ReleaseMemory) -> None:
        self._model = None if parts.weights else self._model
        self.pool = NO_POOL if parts.kv else self.pool
        if self._drafter is not None:
            self._drafter.drop(model=parts.weights, pool=parts.kv)

    def loaded_again(self, draft: LoadedDraft) -> None:
        """Raises CheckpointError for one of another shape."""
        if draft.shape != self._shape:
            raise CheckpointError("what drafts has another shape than what this worker started with")
        self._model = draft.model
        if self._drafter is not None:
            self._drafter.model = self._model

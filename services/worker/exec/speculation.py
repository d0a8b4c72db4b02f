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
from rootstock_llm.services.worker.exec.contracts.drafter import BETWEEN_TEXTS, Drafter, DraftModel, HiddenStates
from rootstock_llm.services.worker.exec.contracts.operations import ReleaseMemory
from rootstock_llm.services.worker.exec.contracts.options import DRAFT, EAGLE3, MTP, NGRAM, NONE, DeviceOptions
from rootstock_llm.services.worker.exec.drafting.model_drafter import MOST_PENDING, ModelDrafter
from rootstock_llm.services.worker.exec.drafting.ngram import NgramDrafter
from rootstock_llm.services.worker.exec.drafting.ngram_index import NgramIndex
from rootstock_llm.services.worker.exec.models.decoder import Decoder
from rootstock_llm.services.worker.exec.models.drafts import DecoderDraftModel, HeadDraftModel, load_eagle3, load_mtp
from rootstock_llm.services.worker.exec.models.loaded_model import LoadedModel
from rootstock_llm.services.worker.exec.pools.kv_pool import NO_POOL, KVPool, LayerKV
from rootstock_llm.services.worker.exec.streams.cuda_streams import Streams
from rootstock_llm.services.worker.exec.weights.checkpoint import CheckpointError, UnsupportedModel
from rootstock_llm.services.worker.exec.weights.load_progress import LoadPhases
from rootstock_llm.services.worker.exec.weights.load_request import LoadRequest
from rootstock_llm.services.worker.exec.weights.quantization import FROM_CHECKPOINT

ModelLoader = Callable[[LoadRequest], LoadedModel]


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A loaded draft model and its sizes. All sizes are 0 without a model."""

    model: DraftModel | None = None  # None if drafts come from n-grams or are off
    aux_layers: tuple[int, ...] = ()  # layers of the target whose inputs the draft model reads, see Decoder
    weight_bytes: int = 0  # bytes of weights that the draft model does not share with the target

    @property
    def shape(self) -> tuple[object, ...]:
        """The values on which the sizes of pools and passes depend."""
        return (self.aux_layers, *(() if self.model is None else (self.model.shift, self.model.layers, self.model.max_context)))


NO_DRAFT = LoadedDraft()


def load_draft(request: LoadRequest, target: LoadedModel, options: DeviceOptions, load: ModelLoader) -> LoadedDraft:
    """Loads the draft model that the options name.

    Args:
        request: the target's load request.
        target: the loaded target.
        load: load_model(), for a separate draft model.

    Raises:
        CheckpointError: the draft model's files are missing or broken.
        UnsupportedModel: the draft model cannot draft for the target.
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
        raise ValueError(
            f"--speculative-algorithm {algorithm} is unknown; the algorithms are {', '.join((NONE, NGRAM, DRAFT, EAGLE3, MTP))}"
        )
    with request.phases.timed("draft"):
        if algorithm == DRAFT:
            dtype = str(target.dtype).removeprefix("torch.")  # the dtype of the pools
            own = replace(
                request,
                folder=Path(path),
                dtype=dtype,
                context_len=target.context_len,
                phases=LoadPhases(),
                quantization=FROM_CHECKPOINT,  # the settings are for the target
            )
            return _small(own.folder, load(own), target)
        return _head(request, target, Path(path) if path else request.folder, algorithm)


def _small(folder: Path, loaded: LoadedModel, target: LoadedModel) -> LoadedDraft:
    if not isinstance(loaded.model, Decoder) or not loaded.generates:
        raise UnsupportedModel(f"{folder} cannot draft: its architecture is not one of our decoders that generate text")
    if loaded.config.vocab_size < target.config.vocab_size:
        raise UnsupportedModel(
            f"{folder} cannot draft: its vocabulary has {loaded.config.vocab_size} tokens, fewer than the model's"
            f" {target.config.vocab_size}"
        )
    layers = tuple(layer for layer in loaded.layers if isinstance(layer, LayerKV))
    if len(layers) < len(loaded.layers):
        raise UnsupportedModel(f"{folder} cannot draft: it has recurrent layers")
    model = DecoderDraftModel(loaded.model, layers, loaded.context_len, int(target.config.vocab_size))
    return LoadedDraft(model, (), loaded.weight_bytes)


def _head(request: LoadRequest, target: LoadedModel, folder: Path, algorithm: str) -> LoadedDraft:
    decoder = target.model
    if not isinstance(decoder, Decoder):
        raise UnsupportedModel(
            f"--speculative-algorithm {algorithm} is not available for this model, because it needs hidden states of our own"
            " decoder, and transformers' code computes the model"
        )
    if algorithm == EAGLE3:
        head = load_eagle3(folder, decoder, target.dtype, target.kernels)
    else:
        head = load_mtp(folder, decoder, target.dtype, target.kernels, request.quantization)
    if request.target.device.type == "cuda":
        torch.cuda.synchronize(request.target.device)  # other streams read the head's weights
    model = HeadDraftModel(head, target.kernels, target.context_len)
    return LoadedDraft(model, head.aux_layers, head.num_bytes(decoder))


def _index_of(corpus: I32, vocab_size: int) -> NgramIndex:
    """Returns an index of the corpus, in which tokens outside of the model's vocabulary are replaced by BETWEEN_TEXTS.

    The corpus is changed in place, because a copy would double its memory.
    """
    np.copyto(corpus, BETWEEN_TEXTS, where=corpus >= vocab_size)
    return NgramIndex(corpus)


class Drafting:
    """Owns the draft model, its pool and the drafter of an executor, also while their memory is released and resumed."""

    def __init__(self, loaded: LoadedDraft, corpus: I32 | None = None) -> None:
        """Stores the draft model. Its pool is allocated by allocate().

        Args:
            corpus: see DeviceOptions.draft_corpus.
        """
        self._corpus = corpus
        self.weight_bytes = loaded.weight_bytes
        self._drafter: ModelDrafter | None = None
        self._model, self.layers = loaded.model, loaded.model.layers if loaded.model is not None else ()
        self.aux_layers, self._shape = loaded.aux_layers, loaded.shape
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
        """Returns the drafter. If the drafter uses a draft model, each later allocate() replaces the pool of the drafter.

        Args:
            table: int32[slots, pages], the target's page table.
            vocab_size: size of the target's vocabulary.
        """
        if self._model is None:
            return NgramDrafter(None if self._corpus is None else _index_of(self._corpus, vocab_size))
        self._drafter = ModelDrafter(self._model, self.pool, table, page_size, vocab_size, streams)
        return self._drafter

    def read(self, target: CausalModel, num_tokens: int) -> HiddenStates:
        """Returns the hidden states that the draft model reads, for the first num_tokens tokens of the target's last pass."""
        if not self.aux_layers:
            return ()
        assert isinstance(target, Decoder), "load_draft() refuses a head for a target that is not our decoder"
        return target.aux_states(num_tokens)

    def rehearse(self, target: CausalModel, num_tokens: int) -> None:
        """Runs a pass of the draft model over num_tokens entries, to compile its kernels and measure its memory.

        The target must have computed num_tokens tokens in its last pass. Called on the forward stream.
        """
        if self._drafter is not None:
            self._drafter.rehearse(num_tokens, self.read(target, num_tokens))

    def largest_pending(self, target: CausalModel, num_slots: int) -> HiddenStates:
        """Allocates as much memory as the pending hidden states of num_slots slots may take, to measure it."""
        return tuple(each.new_empty((num_slots * MOST_PENDING, each.shape[1])) for each in self.read(target, 1))

    def drop(self, parts: ReleaseMemory) -> None:
        self._model = None if parts.weights else self._model
        self.pool = NO_POOL if parts.kv else self.pool
        if self._drafter is not None:
            self._drafter.drop(model=parts.weights, pool=parts.kv)

    def replace_model(self, draft: LoadedDraft) -> None:
        """Uses a draft model that was loaded to resume memory.

        Raises:
            CheckpointError: its sizes differ from those of the draft model with which this worker started.
        """
        if draft.shape != self._shape:
            raise CheckpointError(
                "the draft model's folder now has a model with other sizes than the one with which this worker started."
                " Restart the worker to use it."
            )
        self._model = draft.model
        if self._drafter is not None:
            self._drafter.model = self._model

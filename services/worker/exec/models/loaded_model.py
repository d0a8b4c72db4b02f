"""A loaded model, and the sizes on which the executor's allocations depend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rootstock_llm.kernels.contracts.step_ops import LayerKernels
from rootstock_llm.services.worker.core.contracts.experts import ExpertShape
from rootstock_llm.services.worker.core.contracts.graph_limits import GraphLimits
from rootstock_llm.services.worker.exec.contracts.causal_model import CausalModel
from rootstock_llm.services.worker.exec.contracts.model_info import LoadedInfo
from rootstock_llm.services.worker.exec.pools.embedding_pool import PoolingConfig, PoolingKind
from rootstock_llm.services.worker.exec.pools.kv_pool import LayerCache, bytes_per_token
from rootstock_llm.services.worker.exec.weights.checkpoint import architecture_of, eos_token_ids
from rootstock_llm.services.worker.exec.weights.load_request import LoadRequest

NO_GRAPHS = GraphLimits()


@dataclass(frozen=True, slots=True)
class ExpertReads:
    """The size of the experts' weights. A step reads only the experts that its tokens choose."""

    num_bytes: int  # bytes of all experts of all layers
    chosen_share: float  # experts per token divided by the experts of a layer

    def unread_bytes(self, num_tokens: int) -> int:
        """Returns the expected bytes that a step of this many tokens does not read, if each expert is chosen equally often."""
        return int(self.num_bytes * (1 - self.chosen_share) ** num_tokens)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model on its device, with its sizes and properties."""

    model: CausalModel
    config: Any  # transformers PreTrainedConfig
    kernels: LayerKernels  # kernels for which the weights are packed
    dtype: torch.dtype  # dtype of weights and KV
    layers: tuple[LayerCache, ...]  # size of each layer's cache; empty for an encoder
    context_len: int  # tokens
    weight_bytes: int  # bytes of the weights, packed copies included
    pooling: PoolingConfig  # how an embedding is made of hidden states
    generates: bool  # whether the model has a vocabulary projection
    is_encoder: bool = False
    quantization: str = ""  # see LoadedInfo
    experts: ExpertReads | None = None  # size of the experts' weights; None if each step reads all weights
    routed: ExpertShape | None = None  # experts that the model reports for each token; None if it reports none

    def step_bytes(self, num_tokens: int) -> int:
        """Returns the bytes of weights that a step of this many tokens reads, see ExpertReads."""
        return self.weight_bytes - (0 if self.experts is None else self.experts.unread_bytes(num_tokens))

    @property
    def shape(self) -> tuple[object, ...]:
        """The values on which the allocation of pools, tables and sampler depends, and the experts that the scheduler counts."""
        config = self.config
        sizes = config.vocab_size, config.hidden_size, self.context_len
        return (
            architecture_of(config),
            *sizes,
            self.layers,
            self.dtype,
            self.pooling,
            self.generates,
            self.quantization,
            self.routed,
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values over all layers."""
        return bytes_per_token(self.layers, self.dtype)

    def info(
        self,
        request: LoadRequest,
        num_pages: int,
        graph_rows: tuple[int, ...] = (),
        graphs: GraphLimits = NO_GRAPHS,
        context_len: int | None = None,
    ) -> LoadedInfo:
        """Returns the description of the model for the engine.

        Args:
            request: the request with which the model was loaded.
            num_pages: pages of the KV pool.
            graph_rows: see LoadedInfo.
            graphs: limits of the graphs.
            context_len: context length of the executor, or None for the model's.
        """
        fingerprint = request.target.numerics
        return LoadedInfo(
            architecture=architecture_of(self.config),
            context_len=context_len or self.context_len,
            vocab_size=int(self.config.vocab_size),
            eos_token_ids=eos_token_ids(self.config),
            num_pages=num_pages,
            page_size=request.page_size,
            dtype=str(self.dtype).removeprefix("torch."),
            weight_bytes=self.weight_bytes,
            quantization=self.quantization,
            kv_bytes_per_token=self.kv_bytes_per_token,
            generates=self.generates,
            embedding_size=int(self.config.hidden_size),
            needs_whole_prompt=self.is_encoder,
            pooling_reuses_prefix=self.pooling.kind == PoolingKind.LAST and not self.is_encoder,
            load_seconds=request.phases.seconds(),
            numerics="" if fingerprint is None else fingerprint(self.dtype, self.context_len, request.page_size),
            graph_rows=graph_rows,
            graph_rereads=graphs.rereads,
            eager_step_cost=graphs.eager_cost,
            experts=self.routed,
        )

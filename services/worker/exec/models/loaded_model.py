"""A loaded model, and the sizes by which an executor allocates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rootstock_llm.kernels.contracts.step_ops import LayerKernels
from rootstock_llm.services.worker.core.contracts.graph_limits import GraphLimits
from rootstock_llm.services.worker.exec.contracts.causal_model import CausalModel
from rootstock_llm.services.worker.exec.contracts.model_info import LoadedInfo
from rootstock_llm.services.worker.exec.pools.embedding_pool import PoolingConfig, PoolingKind
from rootstock_llm.services.worker.exec.pools.kv_pool import LayerKV, bytes_per_token
from rootstock_llm.services.worker.exec.weights.checkpoint import architecture_of, eos_token_ids
from rootstock_llm.services.worker.exec.weights.load_request import LoadRequest

NO_GRAPHS = GraphLimits()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: CausalModel
    # transformers PreTrainedConfig
    config: Any
    kernels: LayerKernels
    dtype: torch.dtype
    # cache size of each layer, per token; empty for an encoder
    layers: tuple[LayerKV, ...]
    # tokens
    context_len: int
    # resident
    weight_bytes: int
    # how vectors are made of hidden states
    pooling: PoolingConfig
    # whether the model has a vocabulary projection
    generates: bool
    is_encoder: bool = False

    @property
    def shape(self) -> tuple[object, ...]:
        """The sizes by which pools, tables and sampler are allocated."""
        config = self.config
        sizes = config.vocab_size, config.hidden_size, self.context_len
        return architecture_of(config), *sizes, self.layers, self.dtype, self.pooling, self.generates

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of all layers."""
        return bytes_per_token(self.layers, self.dtype)

    def info(
        self,
        request: LoadRequest,
        num_pages: int,
        graph_rows: tuple[int, ...] = (),
        graphs: GraphLimits = NO_GRAPHS,
        context_len: int | None = None,
    ) -> LoadedInfo:
        """Describes the model to the engine, with the context length of the executor or, by default, of the model."""
        return LoadedInfo(
            architecture=architecture_of(self.config),
            context_len=context_len or self.context_len,
            vocab_size=int(self.config.vocab_size),
            eos_token_ids=eos_token_ids(self.config),
            num_pages=num_pages,
            page_size=request.page_size,
            dtype=str(self.dtype).removeprefix("torch."),
            weight_bytes=self.weight_bytes,
            kv_bytes_per_token=self.kv_bytes_per_token,
            generates=self.generates,
            embedding_size=int(self.config.hidden_size),
            needs_whole_prompt=self.is_encoder,
            pooling_reuses_prefix=self.pooling.kind == PoolingKind.LAST and not self.is_encoder,
            load_seconds=request.phases.seconds(),
            numerics=told(self.dtype, self.context_len, request.page_size)
            if (told := request.target.numerics) is not None
            else "",
            graph_rows=graph_rows,
            graph_rereads=graphs.rereads,
            eager_step_cost=graphs.eager_cost,
        )

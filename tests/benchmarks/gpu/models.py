"""Executors of models with published shapes and random weights that are made on the device, without checkpoint and tokenizer."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from rootstock_llm.services.worker.exec.build import assemble_executor
from rootstock_llm.services.worker.exec.contracts.options import DeviceOptions
from rootstock_llm.services.worker.exec.device import device_of
from rootstock_llm.services.worker.exec.kernel_set import layer_kernels
from rootstock_llm.services.worker.exec.loading import LAST_TOKEN
from rootstock_llm.services.worker.exec.models.decoder import Decoder
from rootstock_llm.services.worker.exec.models.families import Qwen3
from rootstock_llm.services.worker.exec.models.loaded_model import LoadedModel
from rootstock_llm.services.worker.exec.weights.source import RandomSource, WeightReader
from tests.benchmarks.gpu.command import Setting
from tests.benchmarks.gpu.serving import Serving
from tests.benchmarks.make_model import SHAPES, Shape, config_of
from tests.benchmarks.pinned_config import pinned_config

PAGE_SIZE = 16
MEMORY_SHARE = 0.9
STEP_TOKENS = 8192
TOY = replace(SHAPES["tiny"], vocab=512, text_tokens=500)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The model and settings that a benchmark needs."""

    shape: str  # name in SHAPES
    rows: int  # concurrent requests
    context: int  # prompt and output tokens of the longest request
    cuda_graphs: bool = True
    overlap: bool = True
    attention: str = ""  # name of the attention backend; empty: Setting.attention
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model with its executor and scheduler."""

    serving: Serving
    shape: Shape
    weight_bytes: int  # bytes of all weights
    # Bytes of weights that a decode step reads. An untied embedding does not count, because a step reads only a few of its rows.
    read_bytes: int

    @property
    def vocab(self) -> int:
        """Number of token ids for text."""
        return self.shape.text_tokens


def shape_of(name: str, setting: Setting) -> Shape:
    return TOY if setting.toy else SHAPES[name]


def hf_config(shape: Shape) -> Any:
    config = config_of(shape)
    config.architectures = ["Qwen3ForCausalLM"]
    return config


@contextmanager
def serving_of(wanted: Wanted, setting: Setting) -> Iterator[Model]:
    """Yields the wanted model, ready to serve. On exit, closes its executor and frees the memory."""
    shape = shape_of(wanted.shape, setting)
    options = options_of(wanted, setting)
    loaded = random_model(shape, wanted.context + 1, options)
    weight_bytes, embedding = loaded.weight_bytes, 0 if shape.tied else shape.vocab * shape.hidden * loaded.dtype.itemsize
    pages = None if setting.on_gpu else 2 * wanted.rows * (-(-loaded.context_len // PAGE_SIZE) + 1)
    executor, num_pages = assemble_executor(loaded, wanted.rows, PAGE_SIZE, pages, MEMORY_SHARE, options, setting.say)
    config = pinned_config(
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        context_len=loaded.context_len,
        vocab_size=shape.vocab,
        max_running_requests=wanted.rows,
        max_prefill_tokens=options.max_tokens,
        chunked_prefill_size=options.max_tokens,
        adaptive_chunk_s=0.0,
        adaptive_chunk_rows=0,  # off: shorter chunks help only streaming clients; here they would cause more prefill steps
    )
    model = Model(Serving(config, executor, wanted.overlap), shape, weight_bytes, weight_bytes - embedding)
    del loaded
    try:
        yield model
    finally:
        model.serving.close()
        del executor
        gc.collect()
        if setting.on_gpu:
            torch.cuda.empty_cache()


def options_of(wanted: Wanted, setting: Setting) -> DeviceOptions:
    attention, kernels = wanted.attention or setting.attention, setting.kernels
    if not setting.on_gpu:
        attention, kernels = "torch", "torch"
    if wanted.deterministic:
        attention, kernels = "auto", "auto"
    return DeviceOptions(
        device=setting.device,
        deterministic=wanted.deterministic,
        kernels=kernels,
        attention_backend=attention,
        cuda_graphs=wanted.cuda_graphs and setting.graphs and setting.on_gpu,
        max_graph_rows=wanted.rows,
        max_tokens=64 if setting.toy else STEP_TOKENS,
    )


def random_model(shape: Shape, context_len: int, options: DeviceOptions) -> LoadedModel:
    """Makes a model with random weights on the device, in bf16 on a GPU and in float32 elsewhere."""
    config, device = hf_config(shape), device_of(options.device)
    native = Qwen3.config_of(config)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kernels = layer_kernels(options.kernels, device, dtype, options.num_threads, options.deterministic)
    num_positions = (-(-context_len // PAGE_SIZE) + 2) * PAGE_SIZE  # largest number of positions in a slot's pages
    with torch.inference_mode():
        model = Qwen3.read(WeightReader(RandomSource(dtype, device, seed=0), kernels), native)
        cos_sin = [table.to(device) for table in native.rope_tables(num_positions)]
    return LoadedModel(
        model=Decoder(model, cos_sin, kernels.paged_attention),
        config=config,
        kernels=kernels,
        dtype=dtype,
        layers=model.cache,
        context_len=context_len,
        weight_bytes=model.num_bytes(),
        pooling=LAST_TOKEN,
        generates=True,
    )

"""Loads a causal model through transformers' modeling code, and refuses the model if paged attention would compute it wrongly.

1. The config is refused if it has types or sizes of layers that the next checks do not cover.
2. A probe runs the model once over a few tokens. With the attention PROBE_ATTENTION, the layers call probe(), which records the
   sizes and the mask of each layer. It raises UnsupportedModel for a layer that paged attention cannot compute.
3. Two trials compare the results with paged attention to the results with the model's own attention.

A trial computes two prompts in three steps:

1. the first chunk of the first prompt
2. its second chunk, together with the whole second prompt
3. one decoded token of each prompt

The results differ if the model stores state between steps, mixes rows, or needs another kind of attention. In float32, the
results of the whole model are compared. In half precision, the outputs of each attention module are compared, on the inputs that
the module had in the model's own run (own_inputs.py).

The short trial runs all layers and the vocabulary projection. The prompt of the long trial is longer than every block and
compression rate of the config, and than every window up to LONGEST_WINDOW. The long trial runs only the first layers of each
kind, because all layers would take too long for a large model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from rootstock_llm.kernels.contracts.ops import Kernels, RaggedRows
from rootstock_llm.services.shared import served_config
from rootstock_llm.services.shared.served_config import LAYER_TYPES, TYPE_LISTS
from rootstock_llm.services.worker.core.contracts.pool_sizes import PoolSizes
from rootstock_llm.services.worker.exec.contracts.causal_model import CausalModel
from rootstock_llm.services.worker.exec.models.own_inputs import OwnInputs
from rootstock_llm.services.worker.exec.models.transformers_model import (
    PAGED_ATTENTION,
    AttentionLayer,
    PagedLayers,
    StepHolder,
    TransformersModel,
    auto_class_of,
    decoder_of,
    max_context,
    step_of,
)
from rootstock_llm.services.worker.exec.pools.kv_pool import LayerKV, allocate
from rootstock_llm.services.worker.exec.weights import transformers_checkpoint
from rootstock_llm.services.worker.exec.weights.checkpoint import UnsupportedModel, architecture_of
from rootstock_llm.services.worker.exec.weights.transformers_checkpoint import is_causal_head

PROBE_ATTENTION = "rootstock_probe"
MaskFunction = Callable[[Any, Any, Any, Any], Any]
PAGE_SIZE = 4  # tokens of a page in the trials
SHORTEST, CUT, SHORT = 24, 11, 8  # short trial: tokens of the first prompt, of its first chunk, and of the second prompt
LONGER = 160  # smallest length of the long trial's prompt; some classes have a block of 128 tokens that no config shows
BEYOND = 24  # tokens of the long trial's prompt after the last boundary
LONGEST = 2048  # largest boundary in tokens that the long trial covers
LONGEST_WINDOW = 1024  # largest window in tokens that the long trial covers; longer windows are checked only by their masks
TOLERANCE = 1e-3  # largest relative error in float32
HALF_TOLERANCE = 0.05  # largest relative error of an attention module in half precision
AGREEING = 0.95  # share of a long prompt's tokens that must agree; rounding may make a router choose another expert for a few
# A key of a config is a length in tokens if it has a word of _SIZES, and no word of _NO_LENGTHS or _STATE.
_SIZES = {"block", "chunk", "rate", "rates", "stride", "segment", "compress", "compression", "window"}
_NO_LENGTHS = {"type", "types", "pattern", "layers", "layer", "theta", "multiplier", "multiple", "dim", "adjust", "forward"}
_STATE = {"mamba", "ssm", "conv"}  # words for layers that are refused by their type
_MASKED = {"sliding_window", "attention_chunk_size"}  # lengths that transformers expresses by masks, which the probe checks


@dataclass(frozen=True, slots=True)
class LoadedCausal:
    model: TransformersModel  # on the CPU, with paged attention
    probe: Probe  # has recorded the model's layers
    weight_bytes: int  # bytes of parameters and buffers


def load_causal(folder: Path, config: Any, dtype: torch.dtype, context_len: int, kernels: Kernels) -> LoadedCausal:
    """Loads the model on the CPU, and checks it with paged attention.

    Args:
        config: a config that refuse_by_config() accepts.
        context_len: at most max_context().
        kernels: kernels of the CPU, for the checks.

    Raises:
        CheckpointError: the folder cannot be loaded.
        UnsupportedModel: paged attention cannot compute the model, or its results differ from the model's own attention.
    """
    has_head = is_causal_head(config)
    model = transformers_checkpoint.load(folder, config, auto_class_of(config), dtype, "eager")
    decoder = decoder_of(model) if has_head else model
    trial = short_trial(int(config.vocab_size), context_len)
    expected = outputs(model, trial, has_head)  # also shows whether the model runs at all
    if expected[0].shape[1] != config.vocab_size and has_head:
        raise UnsupportedModel(f"the model computes {expected[0].shape[1]} logits, but its vocab_size is {config.vocab_size}")
    holder = StepHolder()
    holder.attach(model)
    probe = _probed(model, holder, trial.ids[0], context_len)
    own = _recorded(model, decoder, trial, probe.modules) if dtype != torch.float32 else None
    model.set_attn_implementation(PAGED_ATTENTION)
    paged = TransformersModel(model, decoder, PagedLayers(holder, probe.layers, kernels), context_len)
    _checked(paged, Subject(probe.ordered(), dtype, kernels, has_head, own), expected, trial)
    _check_long(model, decoder, holder, probe, Subject((), dtype, kernels, False), long_trial(config, context_len))
    return LoadedCausal(paged, probe, transformers_checkpoint.num_bytes(model))


def refuse_by_config(config: Any, requested_context: int | None) -> None:
    """Checks the config of a model before its weights are read. Raises UnsupportedModel.

    Args:
        requested_context: context length in tokens, or None for the longest one of the model.
    """
    name = architecture_of(config)
    refuse_layer_types(config, name)
    if not transformers_checkpoint.class_of(auto_class_of(config), config)._can_set_attn_implementation():
        raise UnsupportedModel(served_config.fixed_attention(name))
    if config.is_encoder_decoder:
        raise UnsupportedModel(served_config.encoder_with_decoder(name))
    if config.sub_configs:
        raise UnsupportedModel(served_config.several_models(name, config.sub_configs))
    longest = max_context(config)
    refuse_sizes(config, min(requested_context or longest, longest), name)


def refuse_layer_types(config: Any, name: str) -> None:
    """Checks that the layers, by their types, cache only keys and values of single tokens. Raises UnsupportedModel if not."""
    unknown = served_config.unknown_layers((getattr(config, each, None) for each in TYPE_LISTS), LAYER_TYPES)
    if unknown:
        raise UnsupportedModel(served_config.unserved_layers(name, unknown))


def refuse_sizes(config: Any, context_len: int, name: str) -> None:
    """Checks that no block, compression rate or window has more than LONGEST and fewer than context_len tokens.

    Raises:
        UnsupportedModel: a length is in this range.
    """
    for key, size in named_sizes(config):
        if LONGEST < size < context_len:
            raise UnsupportedModel(
                f"{name} has {key} {size}; attention can be checked up to {LONGEST} tokens. Set context_len to {size} or less, so"
                f" that {key} has no effect."
            )


def named_sizes(config: Any) -> Iterator[tuple[str, int]]:
    """Yields (key, tokens) of each block, compression rate and window of a config.

    Windows above LONGEST_WINDOW are left out if their key is in _MASKED.
    """
    for key, value in _numbers(config.to_dict(), ""):
        if size_named(key) and value > 1 and not (key in _MASKED and value > LONGEST_WINDOW):
            yield key, value


def size_named(key: str) -> bool:
    """Whether the value of this key of a config is a length in tokens."""
    words = set(key.split("_"))
    return bool(words & _SIZES) and not words & (_NO_LENGTHS | _STATE)


def _numbers(values: Any, key: str) -> Iterator[tuple[str, int]]:
    """Yields (key, integer) for all integers in a JSON value with the given key.

    Integers inside an object get the inner key. If the outer key names a length, they get both keys, joined.
    """
    if isinstance(values, dict):
        for own, value in values.items():
            yield from _numbers(value, f"{key}_{own}" if size_named(key) else str(own))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _numbers(value, key)
    elif isinstance(values, int) and not isinstance(values, bool):
        yield key, values


@dataclass(slots=True)
class Probe:
    """Records the attention layers of one pass, in the order in which they run."""

    context_len: int  # tokens
    layers: dict[int, AttentionLayer] = field(default_factory=dict)  # by layer_idx of the attention module
    modules: dict[int, nn.Module] = field(default_factory=dict)  # the attention modules, by layer_idx

    def record(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, window: int | None) -> None:
        name = type(module).__name__
        number = getattr(module, "layer_idx", None)
        if not isinstance(number, int) or number in self.layers:
            raise UnsupportedModel(f"{name} does not compute exactly one attention per layer")
        if not (query.shape[0] == 1 and query.shape[2] == key.shape[2] == value.shape[2]):
            raise UnsupportedModel(f"{name} attends to tokens that are not in the prompt")
        if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
            raise UnsupportedModel(
                f"{name} has {query.shape[1]} query, {key.shape[1]} key and {value.shape[1]} value heads, which do not match"
            )
        width = self._window(name, mask, window)
        kv = LayerKV(key.shape[1], key.shape[3], value.shape[3], width if width < self.context_len else 0)
        self.layers[number] = AttentionLayer(len(self.layers), kv)
        self.modules[number] = module

    def _window(self, name: str, mask: Any, window: int | None) -> int:
        """Returns the sliding window in tokens, 0 for none. Raises UnsupportedModel for any other mask."""
        if mask is None:
            return window or 0
        if not isinstance(mask, MaskDescription):
            raise UnsupportedModel(f"{name} computes its attention mask without transformers' mask functions")
        if not mask.is_causal_window(self.context_len):
            raise UnsupportedModel(f"the attention mask of {name} is neither causal nor causal with a sliding window")
        return mask.window

    def ordered(self) -> Sequence[LayerKV]:
        """Returns the size of a token's KV in each layer, in the order of the layers' indices in a pool."""
        assert [layer.index for layer in self.layers.values()] == list(range(len(self.layers))), (
            "the layers have the indices 0, 1, ... in a pool"
        )
        return [layer.kv for layer in self.layers.values()]


def _probed(model: Any, holder: StepHolder, ids: Tensor, context_len: int) -> Probe:
    holder.step = probe = Probe(context_len)
    model.set_attn_implementation(PROBE_ATTENTION)
    try:
        model(input_ids=ids[None], position_ids=torch.arange(len(ids))[None], use_cache=False)
    except UnsupportedModel:
        raise
    except Exception as error:  # an error of any type, because it comes from modeling code
        raise UnsupportedModel(f"{type(model).__name__} cannot run with a replaced attention: {error!r}") from error
    if not probe.layers:
        raise UnsupportedModel(f"{type(model).__name__} has no attention layers that can be replaced")
    return probe


def probe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *_: Any,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **__: Any,
) -> tuple[Tensor, None]:
    """Takes the place of a layer's attention: records the layer, and returns zeros.

    Args:
        query, key, value: [1, heads, tokens, elements per head] each.
    """
    if position_bias is not None:
        raise UnsupportedModel(f"{type(module).__name__} adds a bias by position to its scores")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedModel(f"{type(module).__name__} attends in both directions")
    found = step_of(module)
    assert isinstance(found, Probe)
    found.record(module, query, key, value, attention_mask, sliding_window)
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


@dataclass(frozen=True, slots=True)
class MaskDescription:
    """The description from which transformers would make a layer's attention mask."""

    allows: MaskFunction  # (batch, head, query position, key position) -> whether the query attends to the key
    window: int  # sliding window in tokens; 0 for none

    def is_causal_window(self, context_len: int) -> bool:
        """Whether the mask is causal: without a window, or with a sliding window of `window` tokens.

        Only a few positions are checked: at the start, around the end of the window, in the middle, and the last position.
        """
        assert context_len > 0 and self.window >= 0, "the context is positive and the window is not negative"
        keys = torch.arange(context_len)
        edge = self.window or 1
        queries = {0, 1, 31, edge - 1, edge, edge + 1, context_len // 2, context_len - 1}
        return all(self._fits(query, keys) for query in sorted(queries) if query < context_len)

    def _fits(self, query: int, keys: Tensor) -> bool:
        zero, position = torch.tensor(0), torch.tensor(query)
        allowed = torch.as_tensor(self.allows(zero, zero, position, keys)).expand(len(keys))
        expected = (keys <= query) & (keys > query - self.window) if self.window else keys <= query
        return torch.equal(allowed, expected)


def describe_mask(*_: Any, mask_function: MaskFunction, local_size: int | None = None, **__: Any) -> MaskDescription:
    """Replaces transformers' function that makes masks: returns the description of the mask."""
    return MaskDescription(mask_function, local_size or 0)


@dataclass(frozen=True, slots=True)
class Subject:
    """The properties of a model under check."""

    layers: Sequence[LayerKV]  # size of a token's KV in each layer, by the layer's index in the pool
    dtype: torch.dtype
    kernels: Kernels
    has_head: bool  # whether logits are compared; otherwise, hidden states are
    own: OwnInputs | None = None  # inputs and outputs of the model's own attention; only in half precision


@dataclass(frozen=True)
class Trial:
    """Two prompts, and the way in which their results are compared."""

    ids: tuple[Tensor, Tensor]  # int64
    cut: int  # tokens of the first prompt's first chunk
    boundaries: tuple[int, ...] = ()  # positions after which a layer may compute in another way
    agreeing: float = 1.0  # share of the tokens whose results must agree in float32

    @property
    def steps(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]:
        """Slots, starts and ends of the rows of each step. A slot is the index of a prompt."""
        long, short = map(len, self.ids)
        return (
            ((0,), (0,), (self.cut,)),
            ((0, 1), (self.cut, 0), (long - 1, short - 1)),
            ((0, 1), (long - 1, short - 1), (long, short)),
        )

    @cached_property
    def table(self) -> Tensor:
        """The pages of both prompts, int32[2, pages], shuffled."""
        width, narrow = (-(-len(ids) // PAGE_SIZE) for ids in self.ids)
        pages = torch.randperm(width + narrow, generator=torch.Generator().manual_seed(2)).to(torch.int32)
        table = torch.zeros(2, width, dtype=torch.int32)
        table[0], table[1, :narrow] = pages[:width], pages[width:]
        return table

    def pieces(self) -> Iterator[slice]:
        """Yields the ranges of the first prompt between its start, the cut, the boundaries and its end."""
        long = len(self.ids[0])
        edges = sorted({0, long, self.cut, *(each for each in self.boundaries if each < long)})
        yield from (slice(*pair) for pair in pairwise(edges))


def short_trial(vocab_size: int, context_len: int) -> Trial:
    """Returns the trial for all layers. Raises UnsupportedModel if the context is shorter than the prompt."""
    if context_len < SHORTEST:
        raise UnsupportedModel(f"context_len is {context_len}; the check of the model needs at least {SHORTEST} tokens")
    return Trial(_prompts(vocab_size, SHORTEST, 1), CUT)


def long_trial(config: Any, context_len: int) -> Trial:
    """Returns the trial whose prompt is longer than each boundary of the config up to LONGEST, or as long as the context."""
    boundaries = tuple(sorted({size for _, size in named_sizes(config) if size <= LONGEST and size < context_len}))
    tokens = min(context_len, max((LONGER, *(size + BEYOND for size in boundaries))))
    return Trial(_prompts(int(config.vocab_size), tokens, 3), tokens // 2 - 1, boundaries, AGREEING)


def _prompts(vocab_size: int, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns random prompts, int64[tokens] and int64[SHORT]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (tokens + SHORT,), generator=generator)
    return ids[:tokens], ids[tokens:]


def outputs(model: Any, trial: Trial, has_head: bool) -> tuple[Tensor, Tensor]:
    """Computes both prompts with the model's own attention. Returns float32[tokens, vocabulary or hidden size] each."""

    def own(ids: Tensor) -> Tensor:
        output = model(input_ids=ids[None], use_cache=False)
        wide: Tensor = (output.logits if has_head else output.last_hidden_state)[0].float()
        return wide

    return own(trial.ids[0]), own(trial.ids[1])


def _check_long(model: Any, decoder: Any, holder: StepHolder, probe: Probe, subject: Subject, trial: Trial) -> None:
    """Checks the first layers of each kind with the long trial. Afterwards, the model has all layers, with paged attention."""
    count = _layers_of_each_kind(probe, getattr(model.config, "layer_types", None) or ())
    layers = {number: layer for number, layer in probe.layers.items() if number < count}
    with _first_layers(decoder, count, len(probe.layers)) as is_cut:
        layers = layers if is_cut else dict(probe.layers)
        modules, own = {number: probe.modules[number] for number in layers}, None
        if subject.dtype != torch.float32:
            own = _recorded(model, decoder, trial, modules)
        model.set_attn_implementation("eager")
        expected = outputs(decoder, trial, False)
        model.set_attn_implementation(PAGED_ATTENTION)
        paged = TransformersModel(decoder, decoder, PagedLayers(holder, layers, subject.kernels), len(trial.ids[0]))
        _checked(paged, replace(subject, layers=[layer.kv for layer in layers.values()], own=own), expected, trial)


def _recorded(model: Any, decoder: Any, trial: Trial, modules: Mapping[int, nn.Module]) -> OwnInputs:
    """Runs both prompts with the model's own attention. Returns the inputs and outputs of the attention modules."""
    own = OwnInputs(modules)
    model.set_attn_implementation("eager")
    with own.recording():
        outputs(decoder, trial, False)
    return own


def _layers_of_each_kind(probe: Probe, types: Sequence[str]) -> int:
    """Returns the smallest number n of layers so that the first n layers include every kind of attention."""
    kinds: dict[object, int] = {}
    for number, layer in sorted(probe.layers.items()):
        kinds.setdefault((types[number] if number < len(types) else "", layer.kv), number)
    return max(*kinds.values(), 1) + 1


@contextmanager
def _first_layers(decoder: nn.Module, count: int, total: int) -> Iterator[bool]:
    """Removes all layers except the first `count` ones while the block runs.

    Yields:
        Whether layers were removed. False if the decoder's list of layers was not found, or if it has no more than `count`
        layers.
    """
    found = next(_lists_of_layers(decoder, total), None)
    if found is None or count >= total:
        yield False
        return
    parent, name, layers = found
    setattr(parent, name, nn.ModuleList(list(layers)[:count]))
    try:
        yield True
    finally:
        setattr(parent, name, layers)


def _lists_of_layers(decoder: nn.Module, total: int) -> Iterator[tuple[nn.Module, str, nn.ModuleList]]:
    """Yields (parent module, attribute, list) for each list of modules whose element i has the layer with layer_idx i."""
    for parent in decoder.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == total:
                numbers = [{getattr(module, "layer_idx", None) for module in layer.modules()} for layer in child]
                if all(number in found for number, found in enumerate(numbers)):
                    yield parent, name, child


def _checked(paged: TransformersModel, subject: Subject, expected: tuple[Tensor, Tensor], trial: Trial) -> None:
    try:
        check(paged, subject, expected, trial)
    except UnsupportedModel:
        raise
    except Exception as error:  # an error of any type, because it comes from modeling code
        raise UnsupportedModel(f"this model cannot run with paged attention: {error!r}") from error


def check(model: CausalModel, subject: Subject, expected: tuple[Tensor, Tensor], trial: Trial) -> None:
    """Computes the trial with paged attention. Raises UnsupportedModel if the results differ from `expected`, see outputs()."""
    pool = allocate(subject.layers, PoolSizes(int(trial.table.max()) + 1), PAGE_SIZE, subject.dtype, subject.kernels)
    ours = [torch.empty_like(own) for own in expected]
    for slots, starts, ends in trial.steps:
        spans = list(zip(slots, starts, ends, strict=True))
        input_ids = torch.cat([trial.ids[slot][start:end] for slot, start, end in spans])
        assert len(input_ids) == sum(end - start for _, start, end in spans), "each position has a token"
        rows = _rows(trial.table, slots, starts, ends)
        if subject.own is not None:
            with subject.own.replaying(spans) as errors:
                model.forward(input_ids, rows, pool)
            for each in errors:
                _require(each.quantile(AGREEING), HALF_TOLERANCE)
            continue
        model.forward(input_ids, rows, pool)
        wanted = torch.arange(len(input_ids))
        computed = (model.logits(wanted) if subject.has_head else model.states(wanted)).float()
        for (slot, start, end), piece in zip(spans, torch.split(computed, [end - start for _, start, end in spans]), strict=True):
            ours[slot][start:end] = piece
    if subject.own is not None:
        return
    for part in trial.pieces():
        _compare(ours[0][part], expected[0][part], trial.agreeing)
    _compare(ours[1], expected[1], trial.agreeing)


def _rows(table: Tensor, slots: tuple[int, ...], starts: tuple[int, ...], ends: tuple[int, ...]) -> RaggedRows:
    assert len(slots) == len(starts) == len(ends), "each row has a slot, a start and an end"
    assert max(ends) <= table.shape[1] * PAGE_SIZE, "the table has pages for all tokens of a row"
    pieces = [torch.arange(start, end, dtype=torch.int32) for start, end in zip(starts, ends, strict=True)]
    pages = [table[slot][piece // PAGE_SIZE].long() for slot, piece in zip(slots, pieces, strict=True)]
    positions = torch.cat(pieces)
    assert all(start < end for start, end in zip(starts, ends, strict=True)), "no row is empty"
    counts = torch.tensor([len(piece) for piece in pieces], dtype=torch.int32)
    return RaggedRows(
        page_table=table,
        slots=torch.tensor(slots, dtype=torch.int32),
        starts=torch.tensor(starts, dtype=torch.int32),
        num_tokens=counts,
        offsets=(counts.cumsum(0) - counts).to(torch.int32),
        positions=positions,
        locations=torch.cat(pages) * PAGE_SIZE + positions % PAGE_SIZE,
        max_context=max(ends),
    )


def _compare(ours: Tensor, own: Tensor, agreeing: float) -> None:
    """Compares the float32 results of each token by the relative error in the norm.

    The share `agreeing` of the tokens must agree. The results of the other tokens may differ, because rounding may make a router
    choose another expert. Raises UnsupportedModel if too few tokens agree.
    """
    errors = (ours - own).norm(dim=-1) / own.norm(dim=-1).clamp(min=1e-6)
    _require(errors.quantile(agreeing), TOLERANCE)


def _require(error: Tensor, tolerance: float) -> None:
    """Checks that a relative error is a number of at most `tolerance`. Raises UnsupportedModel if not."""
    if not error <= tolerance:
        raise UnsupportedModel(
            f"paged attention computes other results than the model's own attention (relative error {error:.2g})"
        )


AttentionInterface.register(PROBE_ATTENTION, probe)

AttentionMaskInterface.register(PROBE_ATTENTION, describe_mask)

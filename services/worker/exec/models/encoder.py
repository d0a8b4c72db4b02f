"""Encoders such as BERT, computed by transformers' modeling code. Each row is a whole text, with attention in both directions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AutoModel
from transformers.models.auto import modeling_auto

from rootstock_llm.kernels.contracts.ops import RaggedRows
from rootstock_llm.services.worker.exec.contracts.causal_model import NoVocabulary
from rootstock_llm.services.worker.exec.models.transformers_check import HALF_TOLERANCE, TOLERANCE
from rootstock_llm.services.worker.exec.pools.kv_pool import KVPool
from rootstock_llm.services.worker.exec.weights import transformers_checkpoint
from rootstock_llm.services.worker.exec.weights.checkpoint import UnsupportedModel, architecture_of

CHECKED = 1024  # longest text of the check, in tokens; few position tables are longer
SHORT = 8
PADDING_SHARE = 0.25  # limit of the padding in a group of texts that are computed together


class EncoderModel:
    """Implements CausalModel without logits. A row begins at position 0, because there is no KV cache.

    Texts of similar length are computed together, padded to the longest.
    """

    def __init__(self, model: Any, pad_token_id: int, hidden_size: int) -> None:
        """
        Args:
            model: transformers model that takes input_ids and attention_mask.
        """
        self._model = model
        self._pad_token_id = pad_token_id
        self._hidden_size = hidden_size
        self._states: Tensor | None = None

    def to(self, device: torch.device) -> EncoderModel:
        return EncoderModel(self._model.to(device), self._pad_token_id, self._hidden_size)

    def forward(self, input_ids: Tensor, rows: RaggedRows, pool: KVPool) -> None:
        """See TokenModel. Does not use the pool. The host reads the rows' lengths from the device, and therefore waits for it."""
        device = input_ids.device
        states = torch.empty(len(input_ids), self._hidden_size, dtype=self._model.dtype, device=device)
        for group in _groups(rows.num_tokens):
            counts, offsets = rows.num_tokens[group].long(), rows.offsets[group].long()
            columns = torch.arange(int(counts.max()), device=device)
            mask = columns < counts[:, None]
            places = (offsets[:, None] + columns)[mask]
            assert mask.shape == (len(group), len(columns)), "the mask has a row for each text"
            assert len(places) == int(counts.sum()), "each token of the group is computed once"
            states[places] = self._computed(input_ids[places], mask)
        self._states = states

    def of_texts(self, texts: Sequence[Tensor]) -> list[Tensor]:
        """Computes texts together, each int64[length]. Returns their states, [length, hidden size] each."""
        lengths = torch.tensor([len(text) for text in texts])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        return list(torch.split(self._computed(torch.cat(list(texts)), mask), lengths.tolist()))

    def _computed(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        """Returns states [tokens, hidden size].

        Args:
            input_ids: [tokens], of all texts.
            mask: bool[texts, longest], true where a text has a token.
        """
        ids = torch.full(mask.shape, self._pad_token_id, dtype=torch.int64, device=mask.device)
        ids[mask] = input_ids.long()
        found: Tensor = self._model(input_ids=ids, attention_mask=mask.long()).last_hidden_state[mask]
        return found

    def states(self, wanted: Tensor) -> Tensor:
        """See TokenModel."""
        if self._states is None:
            raise RuntimeError("no step has been computed")
        assert wanted.dim() == 1, "indices into the step's tokens"
        return self._states[wanted]

    def logits(self, wanted: Tensor) -> NoReturn:
        raise NoVocabulary("this model computes vectors and samples no tokens")


def _groups(num_tokens: Tensor) -> Iterator[Tensor]:
    """Yields int64 indices of rows that are computed together, with at most PADDING_SHARE of padding."""
    order = torch.argsort(num_tokens, descending=True, stable=True)
    lengths = num_tokens[order].tolist()
    assert lengths and lengths[-1] > 0, "every row has a token"
    first, total = 0, 0
    for index, length in enumerate(lengths):
        padded = lengths[first] * (index + 1 - first)
        if index > first and padded - total - length > PADDING_SHARE * padded:
            yield order[first:index]
            first, total = index, 0
        total += length
    yield order[first:]


def is_encoder(config: Any) -> bool:
    """Whether the architecture is an encoder for which transformers has a masked language model."""
    masked = transformers_checkpoint.class_in(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, config)
    named = architecture_of(config)
    return bool(masked) and not config.is_encoder_decoder and (named == masked or transformers_checkpoint.is_base(config))


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    model: EncoderModel
    # longest text
    max_tokens: int
    weight_bytes: int


def load_encoder(folder: Path, config: Any, dtype: torch.dtype) -> LoadedEncoder:
    """Loads and checks an encoder on the CPU. Raises CheckpointError, UnsupportedModel."""
    if getattr(config, "is_decoder", False):
        raise UnsupportedModel(f"{architecture_of(config)} with is_decoder is not supported")
    attention = "sdpa" if transformers_checkpoint.class_of(AutoModel, config)._supports_sdpa else "eager"
    model = transformers_checkpoint.load(folder, config, AutoModel, dtype, attention)
    encoder = EncoderModel(model, int(config.pad_token_id or 0), int(config.hidden_size))
    max_tokens = _max_tokens(model, config)
    _check(encoder, config, max_tokens, dtype)
    return LoadedEncoder(encoder, max_tokens, transformers_checkpoint.num_bytes(model))


def _check(model: EncoderModel, config: Any, max_tokens: int, dtype: torch.dtype) -> None:
    """Checks that other texts of a batch do not change a text's states, and that the longest text can be computed.

    Raises UnsupportedModel.
    """
    name = architecture_of(config)
    if getattr(config, "attention_type", "") == "block_sparse":
        raise UnsupportedModel(f"{name} is not supported: a long text changes its attention for all later texts")
    longest = min(max_tokens, CHECKED)
    ids = torch.randint(0, int(config.vocab_size), (longest + SHORT,), generator=torch.Generator().manual_seed(1))
    long, short = ids[:longest], ids[longest:]
    with torch.inference_mode():
        try:
            alone, together = model.of_texts([short])[0], model.of_texts([long[: 2 * SHORT], short])[1]
            model.of_texts([long])
        except Exception as error:  # modeling code raises errors of any type; the refusal has the reason
            raise UnsupportedModel(f"{name} does not compute texts of {longest} tokens: {error!r}") from error
    off = (together - alone).float().norm() / alone.float().norm().clamp(min=1e-6)
    tolerance = TOLERANCE if dtype == torch.float32 else HALF_TOLERANCE
    if not off <= tolerance:
        raise UnsupportedModel(f"{name} is not supported: other texts of a batch change a text's vector (off by {off:.2g} of 1)")


def _max_tokens(model: nn.Module, config: Any) -> int:
    """Returns the longest text in tokens. RoBERTa models count positions from pad_token_id, so that fewer are usable."""
    for name, table in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(table, nn.Embedding):
            return int(table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1))
    return int(config.max_position_embeddings)

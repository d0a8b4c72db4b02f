"""Runs encoders such as BERT through transformers' code. Each row is a whole text, with attention in both directions."""

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

CHECKED = 1024  # longest text of the check, in tokens; few encoders have a longer context
SHORT = 8  # tokens of the check's short text
PADDING_SHARE = 0.25  # largest share of padding in a group of texts that are computed together


class EncoderModel:
    """Implements CausalModel without logits. Each row begins at position 0, because an encoder caches no KV.

    Texts of similar length are computed together and padded to the longest of them.
    """

    def __init__(self, model: Any, pad_token_id: int, hidden_size: int) -> None:
        """
        Args:
            model: a model of transformers, called with input_ids and attention_mask.
        """
        self._model = model
        self._pad_token_id = pad_token_id
        self._hidden_size = hidden_size
        self._states: Tensor | None = None

    def to(self, device: torch.device) -> EncoderModel:
        """Moves the model to the device, see transformers_checkpoint.moved()."""
        return EncoderModel(transformers_checkpoint.moved(self._model, device), self._pad_token_id, self._hidden_size)

    def forward(self, input_ids: Tensor, rows: RaggedRows, pool: KVPool) -> None:
        """See TokenModel. Ignores `pool`. Waits for the device, because the host reads the rows' lengths from it."""
        device = input_ids.device
        states = torch.empty(len(input_ids), self._hidden_size, dtype=self._model.dtype, device=device)
        for group in _groups(rows.num_tokens):
            counts, offsets = rows.num_tokens[group].long(), rows.offsets[group].long()
            columns = torch.arange(int(counts.max()), device=device)
            mask = columns < counts[:, None]
            indices = (offsets[:, None] + columns)[mask]
            assert mask.shape == (len(group), len(columns)), "the mask has a row for each text"
            assert len(indices) == int(counts.sum()), "each token of the group is computed once"
            states[indices] = self._computed(input_ids[indices], mask)
        self._states = states

    def of_texts(self, texts: Sequence[Tensor]) -> list[Tensor]:
        """Computes several texts, int64[length] each, in one call of the model.

        Returns their states, [length, hidden size] each.
        """
        lengths = torch.tensor([len(text) for text in texts])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        return list(torch.split(self._computed(torch.cat(list(texts)), mask), lengths.tolist()))

    def _computed(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        """Computes texts in one call of the model, and returns the states of all tokens, [tokens, hidden size].

        Args:
            input_ids: [tokens], the tokens of all texts, text by text.
            mask: bool[texts, length of the longest text], whether the text has a token at the position.
        """
        ids = torch.full(mask.shape, self._pad_token_id, dtype=torch.int64, device=mask.device)
        ids[mask] = input_ids.long()
        found: Tensor = self._model(input_ids=ids, attention_mask=mask.long()).last_hidden_state[mask]
        return found

    def states(self, wanted: Tensor) -> Tensor:
        """See TokenModel."""
        if self._states is None:
            raise RuntimeError("states() was called before the first forward()")
        assert wanted.dim() == 1, "wanted has one dimension: indices of tokens"
        return self._states[wanted]

    def logits(self, wanted: Tensor) -> NoReturn:
        raise NoVocabulary("this model has no vocabulary projection: it computes embeddings and samples no tokens")


def _groups(num_tokens: Tensor) -> Iterator[Tensor]:
    """Splits rows into groups that are computed together. Yields the int64 indices of each group's rows."""
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
    """Whether transformers has a masked language model for the model type, and the architecture is that model or its base."""
    masked = transformers_checkpoint.class_in(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, config)
    named = architecture_of(config)
    return bool(masked) and not config.is_encoder_decoder and (named == masked or transformers_checkpoint.is_base(config))


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    model: EncoderModel
    max_tokens: int  # tokens of the longest text that the model can compute
    weight_bytes: int


def load_encoder(folder: Path, config: Any, dtype: torch.dtype) -> LoadedEncoder:
    """Loads and checks an encoder on the CPU. Raises CheckpointError, UnsupportedModel."""
    if getattr(config, "is_decoder", False):
        raise UnsupportedModel(f"{architecture_of(config)} is not supported with is_decoder, because it is served as an encoder")
    attention = "sdpa" if transformers_checkpoint.class_of(AutoModel, config)._supports_sdpa else "eager"
    model = transformers_checkpoint.load(folder, config, AutoModel, dtype, attention)
    encoder = EncoderModel(model, int(config.pad_token_id or 0), int(config.hidden_size))
    max_tokens = _max_tokens(model, config)
    _check(encoder, config, max_tokens, dtype)
    return LoadedEncoder(encoder, max_tokens, transformers_checkpoint.num_bytes(model))


def _check(model: EncoderModel, config: Any, max_tokens: int, dtype: torch.dtype) -> None:
    """Checks the model with two random texts.

    Raises:
        UnsupportedModel: another text in the batch changes a text's states, or the longest text cannot be computed.
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
        except Exception as error:  # an error of any type, because it comes from modeling code
            raise UnsupportedModel(f"{name} cannot compute texts of {longest} tokens: {error!r}") from error
    off = (together - alone).float().norm() / alone.float().norm().clamp(min=1e-6)
    tolerance = TOLERANCE if dtype == torch.float32 else HALF_TOLERANCE
    if not off <= tolerance:
        raise UnsupportedModel(
            f"{name} is not supported: other texts of a batch change a text's embedding (relative error {off:.2g})"
        )


def _max_tokens(model: nn.Module, config: Any) -> int:
    """Returns the number of tokens of the longest text that the model can compute.

    In RoBERTa models, the first padding_idx + 1 positions of the table are not usable.
    """
    for name, table in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(table, nn.Embedding):
            return int(table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1))
    return int(config.max_position_embeddings)

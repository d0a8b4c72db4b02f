"""Declares the kernels of a decoder's layers and the tensors that they share.

The module rootstock_llm.kernels.reference.layers and the classes CpuKernels and TritonLayers implement the protocol.

Letters in shapes: T tokens of a ragged batch (rows follow each other), R rows, H query heads, G key/value heads, D head size,
P pages of S tokens each. Unless a line states another dtype, a tensor has the model dtype: float32, bfloat16 or float16.
Unless its docstring says otherwise, a kernel writes only its first argument, which aliases no input. All tensors are on one
device. They are contiguous; some implementations also take strided inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.coded_weight import Matrix, Scheme

MOST_TAPS = 8  # largest width of the convolution in gated_delta_rule()


class Matrices(Protocol):
    """The matrices of all experts, of one shape: a tensor, or an object that reads or creates a matrix when it is indexed.

    Either all matrices have codes of one scheme, or no matrix has codes. Some matrices may have zero points and others none.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Matrix: ...


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """The weight of a linear layer in the layout that one implementation of Kernels reads.

    Only the implementation of Kernels that packed the weight may read it.
    """

    data: Tensor  # the weight: [N, K], or packed
    # [N] in the model dtype; None if the layer has no bias. CpuKernels may instead store a bias per packed column, as float32 if
    # the weight has codes.
    bias: Tensor | None
    in_features: int  # K
    out_features: int  # N
    packed: bool  # whether `data` has another shape than [N, K], or than [N, K / 2] for a scheme with 4 bits
    scheme: Scheme | None = None  # meaning of the codes in `data`; None if `data` has no codes
    scales: Tensor | None = None  # bfloat16 or float32, a scale per channel and group; None without a scheme
    zeros: Tensor | None = None  # uint8, a zero point per channel and group; None if the scheme has no zero points
    order: Tensor | None = None  # see CodedWeight; linear() reorders its inputs

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the weight."""
        return tuple(each for each in (self.data, self.bias, self.scales, self.zeros, self.order) if each is not None)


@dataclass(frozen=True, slots=True)
class Activation:
    """The function that joins an expert's gate and up projection.

    The result is (u + shift) * g / (1 + exp(-alpha * g)). Here, g is the gate, clamped to at most `limit`, and u is the up
    projection, clamped to -limit .. limit. The defaults give SwiGLU (arXiv 2002.05202). gpt-oss clamps (arXiv 2508.10925, section
    2.1).
    """

    alpha: float = 1.0
    limit: float = math.inf
    shift: float = 0.0


SWIGLU = Activation()


@dataclass(frozen=True, slots=True)
class Routing:
    """The rules by which a router chooses the experts of a token and their routing weights, see Kernels.route()."""

    top_k: int  # number of experts per token
    scoring: Literal["softmax", "sigmoid"] = "softmax"  # function from the logits of all experts to their scores
    renormalize: bool = False  # whether the routing weights of a token are divided by their sum
    scale: float = 1.0  # factor of the routing weights
    num_groups: int = 1  # number of expert groups: runs of consecutive experts, all of one size
    top_groups: int = 1  # number of expert groups from which a token's experts are chosen
    # Score of an expert group: its largest selection score (DeepSeek-V2), or the sum of its two largest ones (DeepSeek-V3).
    group_score: Literal["maximum", "two_best"] = "maximum"

    def fits(self, num_experts: int) -> bool:
        """Whether num_groups groups of one size divide the experts, and a token's groups have at least top_k experts."""
        size = num_experts // self.num_groups
        return num_experts == size * self.num_groups and 0 < self.top_k <= self.top_groups * size <= num_experts


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The weights of all experts of a layer. All tensors have an additional first dimension: the expert."""

    gate_up: PackedLinear  # from N features to the I features of the gate, followed by the I features of the up projection
    down: PackedLinear  # from I to N features
    activation: Activation

    @property
    def num_experts(self) -> int:
        return len(self.gate_up.data)


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """The tokens that one step computes.

    Row r computes positions starts[r] .. starts[r] + num_tokens[r] - 1 of one sequence.
    """

    page_table: Tensor  # int32[slots, pages]: page ids of each slot's sequence; a kernel reads an entry below 0 as page 0
    slots: Tensor  # int32[R]: row of page_table; below 0: a padding row
    starts: Tensor  # int32[R]: position of the row's first token
    num_tokens: Tensor  # int32[R]: tokens of the row in this step
    offsets: Tensor  # int32[R]: index of the row's first token in the batch
    positions: Tensor  # int32[T]: position of each token in its sequence
    # int64[T]: where the token's key and value are written, as page * S + offset in the page; below 0: not written
    locations: Tensor
    max_context: int  # largest starts[r] + num_tokens[r]
    window_table: Tensor | None = None  # the page table of windowed layers, if their KV is in other pages
    window_locations: Tensor | None = None  # int64[T]: `locations` in the pages of window_table
    states: StateRows | None = None  # states of recurrent layers
    drafts: DraftStates | None = None  # tokens that recurrent layers replay or save; None if they do neither

    def in_windows(self) -> RaggedRows:
        """Returns the same rows with the page table and the locations of windowed layers."""
        if self.window_table is None or self.window_locations is None:
            return self
        return replace(self, page_table=self.window_table, locations=self.window_locations)


@dataclass(frozen=True, slots=True)
class StateRows:
    """The recurrent states of a step's rows, as units of the state pools; -1 for none. No unit is both read and written."""

    before: Tensor  # int32[R]: unit of the state before the row's first token; -1: the row begins its sequence, with zeros
    after: Tensor  # int32[R]: unit that gets the state after the row's last token
    cuts: Tensor  # int32[R]: number of the row's tokens after which the state is also stored in at_cut; 0: not stored
    at_cut: Tensor  # int32[R]: unit that gets the state after `cuts` tokens


@dataclass(frozen=True, slots=True)
class DraftStates:
    """The tokens that recurrent layers replay or save in a step, because of draft tokens in it or accepted ones of earlier steps.

    The layers have two launches. The first replays tokens for the Q rows that have draft tokens, and stores their states. The
    second computes the own tokens of the R rows of RaggedRows.states. For a row without draft tokens, it first computes the
    replayed tokens, which are inserted before the row's own tokens.
    """

    offsets: Tensor  # int32[R]: index of the row's first token in the second launch
    num_tokens: Tensor  # int32[R]: tokens of the row in the second launch, inserted ones included
    replays: StateRows  # [Q], the states of the first launch
    replay_offsets: Tensor  # int32[Q]: index of the row's first token in the first launch
    replay_num_tokens: Tensor  # int32[Q]: tokens of the row in the first launch; 0: the row copies its state
    sources: Tensor  # int64: rows of the saved inputs that are read, first those of the first launch
    num_inserted: int  # number of the last elements of `sources`, whose tokens are inserted into the step's tokens
    order: Tensor  # int64: index of each token in the inserted tokens followed by the step's tokens; empty if none is inserted
    own: Tensor  # int64[T]: index of each token of the step after the insertion; empty if none is inserted
    saved: Tensor  # int64[S]: tokens of the step whose inputs are saved
    targets: Tensor  # int64[S]: rows of the saved inputs in which the inputs of these tokens are saved


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """The rule by which the attention of a layer turns products of queries and keys into softmax weights."""

    scale: float  # factor of the products
    window: int = 0  # number of last positions, including the token's own position, to which a token attends; 0 for all
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0 for no cap (Gemma 2, arXiv 2408.00118, section 2)
    # float32[H], an additional score in each softmax of the head, without a value (gpt-oss, arXiv 2508.10925); None for no sinks
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DeltaGates:
    """The weights from which a Gated DeltaNet layer computes the decay of its state, per value head."""

    rates: Tensor  # float32[J], exp(A_log)
    biases: Tensor  # float32[J], dt_bias


def require_contiguous(*tensors: Tensor) -> None:
    """Checks that each tensor is contiguous. Raises ValueError with the shape of the first strided tensor."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous")


def misfit(*tensors: Tensor) -> ValueError:
    """Returns an error that lists the shapes and dtypes of the tensors.

    Call it only after a check has failed, because formatting the shapes takes longer than a kernel launch.
    """
    return ValueError(f"shapes or dtypes do not fit: {', '.join(f'{tuple(t.shape)} {t.dtype}' for t in tensors)}")


class Kernels(Protocol):
    """The kernels of a decoder's layers.

    Deterministic implementations also guarantee results to the last bit, for one build and one set of CPU instructions:

    - A row of linear(), experts(), route(), a norm or an activation depends on no other row.
    - A token of paged_attention() depends only on the tokens of its sequence up to itself. The number of other rows, the chunks
      of a prompt and the page ids have no influence.
    """

    def allocate_pool(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocates memory for a key or value pool.

        The contents are undefined. On a CPU, the system commits a page of memory when a kernel first writes to it.
        """

    def pack_linear(self, weight: Matrix, bias: Tensor | None) -> PackedLinear:
        """Packs a weight [N, K] of elements or of codes for linear().

        The caller may drop the weight afterwards. Codes are stored with the bits of their scheme.
        """

    def linear(self, out: Tensor, x: Tensor, weight: PackedLinear) -> None:
        """Computes out [T, N] = x [T, K] @ weight.T + bias, accumulated in float32.

        `out` has the model dtype or float32. If the weight has codes and the model dtype is bfloat16, an implementation may round
        the elements of x to 8 bits, with a scale for each row and group, and multiply integers.
        """

    def embedding(self, out: Tensor, input_ids: Tensor, weight: PackedLinear) -> None:
        """Copies rows of a weight [N, K] to out [T, K].

        Args:
            input_ids: int64[T] from 0 to N - 1, the rows.
            weight: a result of pack_linear() without bias, or an unpacked weight. If it has codes, their scheme has 8 bits and a
                scale per row.
        """

    def pack_gated(self, weight: Matrix, bias: Tensor | None) -> PackedLinear:
        """Packs a weight [2 N, K] of elements or of codes for gated_linear(). The first N rows are the gate."""

    def gated_linear(self, out: Tensor, x: Tensor, weight: PackedLinear) -> None:
        """Computes out [T, N] = silu(x @ gate.T) * (x @ up.T) with x [T, K]; biases are added before the activation."""

    def rms_norm(self, out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
        """Computes out [T, N] = x / sqrt(mean(x^2) + eps) * weight, float32[N], in float32.

        The source is Zhang and Sennrich, arXiv 1910.07467, section 4.
        """

    def fused_add_rms_norm(self, out: Tensor, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        """Adds x [T, N] to residual [T, N] in place, then computes out = rms_norm(residual)."""

    def silu_and_mul(self, out: Tensor, x: Tensor) -> None:
        """Computes out [T, N] = silu(x[:, :N]) * x[:, N:] with x [T, 2N] (SwiGLU: Shazeer, arXiv 2002.05202, section 2)."""

    def gelu_and_mul(self, out: Tensor, x: Tensor) -> None:
        """Computes out [T, N] = gelu(x[:, :N]) * x[:, N:] with x [T, 2N].

        gelu is Hendrycks and Gimpel's approximation by tanh (arXiv 1606.08415, section 2).
        """

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> None:
        """Multiplies x [T, N] by sigmoid(gate) in place. The gate is [T, N], or [T, 1] with a factor for a whole row."""

    def rope_write_kv(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        cos_sin: Tensor,
        rows: RaggedRows,
        k_pool: Tensor,
        v_pool: Tensor,
    ) -> None:
        """Applies the rotary embedding to q and k, and writes k and v to the pools.

        The source is Su et al., arXiv 2104.09864, section 3.4.2. The rotation pairs the two halves of a head, as GPT-NeoX does.

        Args:
            qkv: [T, (H + 2G) D]; q is rewritten in place.
            norms: weights float32[D] of the RMS norms of q and k, applied to each head before the rotation; None for no norms.
            eps: epsilon of these norms.
            cos_sin: float32[positions, D], cosines and then sines of D / 2 angles.
            rows: the tokens' rows. Keys and values are written only at rows.locations.
            k_pool: [P, G, S, D].
            v_pool: [P, G, S, D].
        """

    def paged_attention(self, out: Tensor, q: Tensor, k_pool: Tensor, v_pool: Tensor, rows: RaggedRows, rule: ScoreRule) -> None:
        """Computes out [T, H E], in which each token attends to the positions of its row up to its own position.

        E is the size of a value, which may differ from D.

        Args:
            out: [T, H E].
            q: [T, C], whose first H D columns are the queries. Its rows may be strided. H / G query heads share a key/value head.
            k_pool: [P, G, S, D].
            v_pool: [P, G, S, E].
            rows: the row's page table gives the pages of the keys and values. Pages before all windows of a row are not read.
            rule: the scale of the scores, their window and cap, and the sinks.
        """

    def write_kv(self, keys: Tensor, values: Tensor, rows: RaggedRows, k_pool: Tensor, v_pool: Tensor) -> None:
        """Writes keys [T, G, D] and values [T, G, E] to the pools [P, G, S, D] and [P, G, S, E].

        Writes only at rows.locations.
        """

    def gated_delta_rule(
        self,
        out: Tensor,
        qkv: Tensor,
        gates: Tensor,
        weight: Tensor,
        decay: DeltaGates,
        rows: RaggedRows,
        states: StateRows,
        conv_pool: Tensor,
        state_pool: Tensor,
    ) -> None:
        """Computes a causal convolution and the gated delta rule, one token after the other.

        The source is Yang et al., arXiv 2412.06464, equation 10. S [D, E] is the state of a value head. A token has a key k and a
        query q (both of length 1, q also divided by sqrt(D)), a value v, a decay a and a learning rate b:

            S = a S + k (b (v - a S^T k))^T,    out = S^T q

        Letters: I key heads, J value heads, D key size, E value size, C = 2 I D + J E channels, K taps, U units. Value head j
        uses key head j // (J / I). All arithmetic is in float32; the result of the convolution is rounded to the model dtype. The
        bits of a token do not depend on the way in which its sequence is cut into rows.

        Args:
            out: [T, J E].
            qkv: [T, C], queries, keys and values before the convolution; overwritten.
            gates: [T, 2 J], inputs of b = sigmoid(.), then inputs of a = exp(-rate * softplus(. + bias)).
            weight: [C, K] of the convolution, whose result passes through silu.
            decay: rate and bias of each value head.
            rows: the tokens' rows. A row may have no token; it then copies its state.
            states: the units that each row reads and writes.
            conv_pool: [U, K - 1, C], the last inputs of the convolution, oldest first.
            state_pool: float32[U, J, D, E].
        """

    def gated_rms_norm(self, out: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> None:
        """Computes out [T, N] = rms_norm(x [T, N]) * silu(gate [T, N]) in float32, with weight float32[N]."""

    def route(self, weights: Tensor, ids: Tensor, logits: Tensor, bias: Tensor | None, routing: Routing) -> None:
        """Chooses the experts of each token from the router's logits, in float32.

        1. The score of an expert is the softmax or the sigmoid of its logit. Its selection score is this score plus the bias.
        2. The top_groups expert groups with the largest scores remain.
        3. The top_k experts of these groups with the largest selection scores are chosen, in descending order.
        4. Their routing weights are their scores. If renormalize is set, each is divided by their sum + 1e-20. Then each is
           multiplied by Routing.scale.

        If selection scores are equal, the lower id comes first. A NaN counts as minus infinity. A softmax of the chosen logits
        (gpt-oss) equals a softmax of all logits with renormalize.

        Args:
            weights: float32[T, k], filled with the routing weights.
            ids: int32[T, k], filled with k different ids for each token.
            logits: float32[T, E].
            bias: float32[E], added to the scores for the selection only (DeepSeek-V3, arXiv 2412.19437, section 2.1.2); None for
                no bias.
            routing: the rules, which fit E experts.
        """

    def pack_experts(
        self, gate_up: Matrices, gate_up_bias: Tensor | None, down: Matrices, down_bias: Tensor | None, activation: Activation
    ) -> PackedExperts:
        """Packs the weights of E experts for experts().

        Each matrix is indexed once, so that indexing may read a file. An implementation that packs copies has only a few matrices
        in memory at a time. The caller may drop the matrices afterwards.

        Args:
            gate_up: matrices [2 I, N] of all experts, whose first I rows are the gate.
            gate_up_bias: [E, 2 I]; None if the experts have no biases.
            down: matrices [N, I] of all experts.
            down_bias: [E, N]; None if the experts have no biases.
            activation: the function between both projections.

        Raises:
            ValueError: only some matrices have codes, those of one projection have different schemes, or a matrix has an order.
        """

    def experts(self, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, packed: PackedExperts) -> None:
        """Computes out [T, N], the weighted sum of the outputs of each token's experts.

        The weights of an expert without tokens are not read. The activation's result has the model dtype. All other sums and
        products are in float32. The sum over a token's experts, in the order of its choices, is rounded once. The bits of the
        result do not depend on the ids of the experts. If the weights have codes, both products may round their inputs to 8 bits,
        as linear() does.

        Args:
            out: [T, N]. It may be x.
            x: [T, N].
            ids: int32[T, k], from 0 to E - 1.
            weights: float32[T, k], the routing weights.
            packed: the weights of the experts.
        """

"""Bytes that Megatron's plain ("local") layers keep: torch operators one by one, without fused kernels.

Counted operator by operator, as `dynapipe train` runs on a CPU: more than the fused kernels of accelerators keep.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.features import PiecePositions
from dynapipe_ext.costs.model import IntArray
from dynapipe_ext.models.architecture import Architecture

_IDS = 25  # bytes a token: ids (8) and labels (8), weights and losses (8), a mask (1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainLayers:
    """What a decoder-only model keeps on one of `tp` ranks, in values of 2 or 4 bytes.

    `divided`: sequence parallelism. `packed`: documents end to end; their attention is called one by one and joined.
    """

    architecture: Architecture
    tp: int
    values: int
    divided: bool = False
    packed: bool = False

    @staticmethod
    def know(architecture: Architecture) -> bool:
        """Whether its layers are counted: neither those of experts nor latent attention nor capped scores are."""
        a = architecture
        return not (a.num_experts or a.num_decoder_layers or a.attention_softcap or a.latent)

    @classmethod
    def of(cls, costs: AnalyticCosts, *, packed: bool) -> PlainLayers:
        return cls(
            architecture=costs.architecture,
            tp=costs.topology.tp,
            values=costs.activation_bytes_per_value,
            divided=costs.sequence_parallel,
            packed=packed,
        )

    def layer_bytes(self, tokens: IntArray, positions: IntArray) -> IntArray:
        """From forward to backward without recomputation; `positions`: of one row."""
        a, tp, v = self.architecture, self.tp, self.values
        rope = a.position == "rope"
        attention = self._attention_values
        mlp = (5 if a.gated_mlp else 2) * a.ffn_hidden_size // tp
        a_token = v * (attention + mlp) + 4 * a.num_heads // tp  # and the log-sum-exp, fp32
        tables = 4 * v * a.head_dim if rope else 0  # sine and cosine, of queries and of keys
        a_token += self._qk_norm_bytes()
        norms = self._share(self._layer_norms_bytes() * tokens)
        kept_bytes: IntArray = a_token * tokens + norms + tables * positions + self._window_bytes(tokens, positions)
        return kept_bytes

    @property
    def _attention_values(self) -> int:
        """Of one token. Grouped: keys and values repeated for every head, and the queries. Else values lie in the whole
        output of qkv, and turned queries and keys are their own. And the output; joined from documents once more.
        """
        a = self.architecture
        query, kv = a.query_size // self.tp, a.kv_size_on(self.tp)
        turned = query + kv if a.position == "rope" else 0
        attended = 3 * query if a.num_query_groups < a.num_heads else query + 2 * kv + turned
        return attended + query * (2 if self.packed else 1)

    def spared_bytes(self, own: IntArray, *, selective: npt.NDArray[np.bool_]) -> IntArray:
        """Bytes that a layer saves on a piece's own positions, whose keys and values lie in buffers. It keeps their
        queries and outputs alone, as the softmax is computed again; where attention is recomputed, it also keeps the
        inputs of attention.
        """
        a = self.architecture
        query, kv = a.query_size // self.tp, a.kv_size_on(self.tp)
        turned = query + kv if a.position == "rope" else 0
        piece_values = np.where(selective, 2 * query + 2 * kv + turned, 2 * query)
        spared: IntArray = (self.values * (self._attention_values - piece_values) + 4 * a.num_heads // self.tp) * own
        return spared

    def carried_bytes(self, positions: PiecePositions) -> tuple[IntArray, IntArray]:
        """What pieces keep in each layer for one another, and the gradients of all positions so far while one runs."""
        a_position = 2 * self.architecture.kv_size_on(self.tp)  # values
        return a_position * positions.kept_bytes(self.values), a_position * self.values * positions.joined

    def _layer_norms_bytes(self) -> int:
        """Bytes that a layer's norms keep of one token, with the inputs of the products: these are kept wherever norms
        stand. A norm behind a product keeps an input of its own; its output is only added to the residual stream, and
        not kept.
        """
        before = 2 * self._norm_bytes()
        if self.architecture.norm_placement != "both":
            return before
        return before + 2 * (self._norm_bytes() - self.architecture.hidden_size * self.values)

    def _qk_norm_bytes(self) -> int:
        """Of the norms of queries and keys and one token: fp32 inputs and normalised values, statistics. Of 4-byte
        values inputs are no copies, unless all heads are normalised at once; those of grouped heads are.
        """
        a, tp, v = self.architecture, self.tp, self.values
        if not a.qk_norm:
            return 0
        query, kv = a.query_size // tp, a.kv_size_on(tp)
        if a.qk_norm_whole:
            return 8 * (query + kv) + 8
        statistics = 4 * (a.num_heads // tp + -(-a.num_query_groups // tp))
        if v < 4:
            return 8 * (query + kv) + statistics
        return (12 if a.num_query_groups < a.num_heads else 4) * (query + kv) + statistics

    def _window_bytes(self, tokens: IntArray, positions: IntArray) -> IntArray:
        """Of a mean layer where some have windows: blocks of queries, each with the keys and values of its window (own
        copies where heads are grouped), its output and its mask. A packed row counts as one document, the most it is.
        """
        a, v, window = self.architecture, self.values, self.architecture.sliding_window
        if not window:
            return 0 * tokens
        more = np.maximum(-(-positions // window) - 1, 0)  # blocks after the first
        rest = positions - more * window
        masks = window * window + (more - 1) * window * (2 * window - 1) + rest * (rest + window - 1)
        rows = tokens // np.maximum(positions, 1)
        grouped = a.num_query_groups < a.num_heads
        again = 2 * rows * more * (window - 1) if grouped else 0
        whole = v * (a.query_size // self.tp * (tokens + again) + masks)
        of_mean: IntArray = np.where(more > 0, whole * a.num_window_layers // a.num_layers, 0)
        return of_mean

    def _norm_bytes(self) -> int:
        """Of one norm and one token: input, output, statistics; RMSNorm of 16-bit values is computed in fp32."""
        h, v = self.architecture.hidden_size, self.values
        if self.architecture.norm == "layernorm":
            return 2 * h * v + 2 * v
        return (3 * h * v if v == 4 else 8 * h + h * v) + 4

    def _share(self, num_bytes: IntArray) -> IntArray:
        return -(-num_bytes // self.tp) if self.divided else num_bytes

    def checkpoint_bytes(self, tokens: IntArray) -> IntArray:
        """Of a layer under full recomputation: its input."""
        return self._share(self.values * self.architecture.hidden_size * tokens)

    def shared_bytes(self, positions: IntArray) -> IntArray:
        """Of all layers of a stage under full recomputation together: the fp32 angles of rotary positions."""
        angles = 4 * self.architecture.head_dim if self.architecture.position == "rope" else 0
        return angles * positions

    def head_bytes(self, tokens: IntArray) -> IntArray:
        """Of the final norm, the head and the loss: fp32 probabilities of the whole vocabulary."""
        return self.logits_bytes(tokens) + self._share(self._norm_bytes() * tokens) + _IDS * tokens

    def logits_bytes(self, tokens: IntArray) -> IntArray:
        """Of these the probabilities."""
        return 4 * self.architecture.vocab_size // self.tp * tokens

    @property
    def _summed(self) -> int:
        """Bytes of a weight's gradient while it is added to the fp32 sums: itself, and cast where it is narrower."""
        return self.values + (4 if self.values < 4 else 0)

    @property
    def _embedding(self) -> int:
        return self.architecture.vocab_size // self.tp * self.architecture.hidden_size

    def head_working_bytes(self, tokens: IntArray, *, tied: bool) -> IntArray:
        """Bytes beside the kept ones while the head runs backwards: the gradient of its input, and for 4-byte values
        that of its weight (the gradient of the logits takes the place of the probabilities). For 2-byte values it is
        the gradient of the logits and, once the probabilities are freed, that of the weight.
        """
        vocab, v = self.architecture.vocab_size // self.tp, self.values
        gradient: IntArray = v * self.architecture.hidden_size * tokens
        if v == 4:
            return gradient + v * self._embedding
        summed = 0 if tied else self._summed * self._embedding - 4 * vocab * tokens
        weight = np.maximum(v * self._embedding + (v - 4) * vocab * tokens, summed)
        return gradient + np.maximum(v * vocab * tokens, weight)

    def embedding_working_bytes(self, *, tied: bool) -> int:
        """At a backward's end, no activation left: the embedding's gradient, beside a tied head's or its cast."""
        return self._embedding * max(self._summed, 2 * self.values if tied else 0)

    def layer_working_bytes(
        self, tokens: IntArray, kept_bytes: IntArray, positions: IntArray, *, tied: bool
    ) -> IntArray:
        """Bytes beside `kept_bytes` while one layer runs backwards, at the fullest moment of its MLP. The moments are:
        the second product has its gradients; its weight's gradient is summed; the activation function has its gradient;
        then the first two again, of the first product. At each of them there are also recomputed activations, the
        gradients of the residual stream, and the gradient of a tied embedding, which waits for the embedding itself.
        """
        a, tp, v = self.architecture, self.tp, self.values
        h, f, fc1 = a.hidden_size, a.ffn_hidden_size // tp, a.fc1_size // tp
        whole = self.layer_bytes(tokens, positions)
        stream = v * h * tokens * np.where(whole > kept_bytes, 2, 1)  # the output of recomputation, too
        freed = (5 if a.gated_mlp else 2) * f
        moments = (
            v * f * (tokens + h),
            self._summed * f * h + 0 * tokens,
            v * fc1 * tokens,
            v * ((fc1 + h - freed) * tokens + fc1 * h),
            self._summed * fc1 * h - v * freed * tokens,
        )
        waiting = v * self._embedding if tied else 0
        working: IntArray = whole - kept_bytes + stream + np.max(moments, axis=0) + waiting
        return working

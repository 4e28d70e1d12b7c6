"""Bytes that Megatron's plain ("local") layers keep: torch operators one by one, without fused kernels.

Counted operator by operator, as `dynapipe train` runs on a CPU: more than the fused kernels of accelerators keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynapipe_ext.batch.micro_batches import MicroBatch
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.features import Features, split_kinds
from dynapipe_ext.costs.grid import BoolArray
from dynapipe_ext.costs.model import IntArray, keep_input_bytes
from dynapipe_ext.models.architecture import Architecture

_IDS = 25  # bytes per token: ids (8) and labels (8), weights and losses (8), a mask (1)


def counts_plain_layers(a: Architecture) -> bool:
    """Return whether a model's layers are counted: those of experts, latent attention and capped scores are not."""
    return not (a.num_experts or a.num_decoder_layers or a.attention_softcap or a.latent)


@dataclass(frozen=True, slots=True)
class PlainLayers:
    """Bytes of the decoder-only model of `base` on one rank. `packed`: documents end to end, whose attention is
    called one by one and joined.
    """

    base: AnalyticCosts
    packed: bool

    @property
    def architecture(self) -> Architecture:
        return self.base.architecture

    @property
    def tp(self) -> int:
        return self.base.topology.tp

    @property
    def values(self) -> int:
        """Bytes per value."""
        return self.base.activation_bytes_per_value

    def count_bytes(self, features: Features, transfer_bytes: IntArray) -> tuple[IntArray, IntArray]:
        """Return the stored and the working bytes of micro-batches, of every stage.

        When a layer runs backwards the head's bytes are gone, and at the end the layers' too.
        """
        a, v = self.architecture, self.values
        tokens, positions, pieces = features.positions[0], features.shapes[1], features.pieces
        recompute, is_chunked = split_kinds(features.recompute)
        is_chunked, is_full = self.base.needs_chunks(is_chunked, tokens), recompute == "full"
        layers = self.base.layout.counts["encoder"]
        stages = np.arange(len(layers))[:, None]
        is_first, is_last = stages == 0, stages == len(layers) - 1
        tied = a.tied_embeddings and len(layers) == 1
        checkpoint_bytes = self._share(v * a.hidden_size * tokens)
        kept_bytes = np.where(is_full, checkpoint_bytes, self.count_layer_bytes(tokens, positions))
        angles = 4 * a.head_dim if a.position == "rope" else 0  # fp32, kept once for all recomputed layers
        head = is_last * self._count_head_bytes(tokens, is_chunked)
        stored = layers * kept_bytes + (layers > 0) * is_full * angles * positions + head
        of_layer = np.where(
            layers > 0, self.count_layer_working_bytes(tokens, kept_bytes, positions, tied=tied) - head, 0
        )
        chunked = self.base.count_chunked_head_bytes(tokens)[1]
        of_head = is_last * np.where(is_chunked, chunked, self.count_head_working_bytes(tokens, tied=tied))
        of_embedding = is_first * self.count_embedding_working_bytes(tied=tied) - stored
        working = np.maximum(np.maximum(of_layer, of_head), np.maximum(of_embedding, 0))
        if pieces is None:
            return keep_input_bytes(recompute == "stage", stored, working, transfer_bytes)
        stored = stored - layers * ~is_full * self._count_spared_bytes(pieces.own, recompute == "selective")
        stored, working = keep_input_bytes(recompute == "stage", stored, working, transfer_bytes)
        a_position = 2 * a.kv_size_on(self.tp)  # values that pieces keep for one another; a running one has gradients
        stored = stored + layers * (a_position * pieces.count_kept_bytes(v))
        return stored, working + (layers > 0) * (a_position * v * pieces.joined)

    def count_head_bytes(self, micro_batches: Sequence[MicroBatch]) -> IntArray:
        """Return the part of the last stage's stored bytes that is the head's, shape (M,)."""
        kept_positions = (0 if m.layer_recompute == "stage" else m.padded_tokens for m in micro_batches)
        positions = np.fromiter(kept_positions, np.int64)
        _, is_chunked = split_kinds(np.array([m.recompute for m in micro_batches], np.str_))
        return self._count_head_bytes(positions, self.base.needs_chunks(is_chunked, positions))

    def _count_head_bytes(self, tokens: IntArray, is_chunked: BoolArray) -> IntArray:
        """Count the final norm, the head and the loss: fp32 probabilities of the full vocabulary, or chunks."""
        probabilities = 4 * self.architecture.vocab_size // self.tp * tokens
        kept_bytes = np.where(is_chunked, self.base.count_chunked_head_bytes(tokens)[0], probabilities)
        return np.asarray(kept_bytes + self._share(self._count_norm_bytes() * tokens) + _IDS * tokens)

    def count_layer_bytes(self, tokens: IntArray, positions: IntArray) -> IntArray:
        """Count the bytes of a layer from forward to backward without recomputation; `positions`: of one row."""
        a, tp, v = self.architecture, self.tp, self.values
        rope = a.position == "rope"
        attention = self._attention_values
        mlp = (5 if a.gated_mlp else 2) * a.ffn_hidden_size // tp
        a_token = v * (attention + mlp) + 4 * a.num_heads // tp  # and the log-sum-exp, fp32
        tables = 4 * v * a.head_dim if rope else 0  # sine and cosine, of queries and of keys
        a_token += self._count_qk_norm_bytes()
        norms = self._share(self._count_layer_norms_bytes() * tokens)
        kept_bytes: IntArray = (
            a_token * tokens + norms + tables * positions + self._count_window_bytes(tokens, positions)
        )
        return kept_bytes

    @property
    def _attention_values(self) -> int:
        """Values per token. Grouped: keys and values repeated for every head, and the queries. Else values are in the
        full output of qkv, and queries and keys after rotary embedding are separate. And the output, if packed twice.
        """
        a = self.architecture
        query, kv = a.query_size // self.tp, a.kv_size_on(self.tp)
        turned = query + kv if a.position == "rope" else 0
        attended = 3 * query if a.num_query_groups < a.num_heads else query + 2 * kv + turned
        return attended + query * (2 if self.packed else 1)

    def _count_spared_bytes(self, own: IntArray, is_selective: BoolArray) -> IntArray:
        """Count what a layer saves on a piece's own positions, whose keys and values are in buffers. It only keeps
        their queries and outputs, as the softmax is computed again; if attention is recomputed, its inputs too.
        """
        a = self.architecture
        query, kv = a.query_size // self.tp, a.kv_size_on(self.tp)
        turned = query + kv if a.position == "rope" else 0
        piece_values = np.where(is_selective, 2 * query + 2 * kv + turned, 2 * query)
        spared: IntArray = (self.values * (self._attention_values - piece_values) + 4 * a.num_heads // self.tp) * own
        return spared

    def _count_layer_norms_bytes(self) -> int:
        """Count the bytes that a layer's norms keep per token, with the inputs of the products, which are kept in any
        case. A norm after a product keeps an input of its own; its output is only added to the residual stream, and
        not kept.
        """
        before = 2 * self._count_norm_bytes()
        if self.architecture.norm_placement != "both":
            return before
        return before + 2 * (self._count_norm_bytes() - self.architecture.hidden_size * self.values)

    def _count_qk_norm_bytes(self) -> int:
        """Count the bytes per token of the norms of queries and keys: fp32 inputs and normalised values, statistics.
        Inputs of 4-byte values are not copied, unless all heads are normalised at once; those of grouped heads are.
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

    def _count_window_bytes(self, tokens: IntArray, positions: IntArray) -> IntArray:
        """Count the bytes of a mean layer if some have windows: blocks of queries, each with the keys and values of its
        window (own copies if heads are grouped), its output and its mask. A packed row counts as one document.
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

    def _count_norm_bytes(self) -> int:
        """Count the bytes of one norm per token: input, output, statistics; RMSNorm of 16-bit values is in fp32."""
        h, v = self.architecture.hidden_size, self.values
        if self.architecture.norm == "layernorm":
            return 2 * h * v + 2 * v
        return (3 * h * v if v == 4 else 8 * h + h * v) + 4

    def _share(self, num_bytes: IntArray) -> IntArray:
        return -(-num_bytes // self.tp) if self.base.sequence_parallel else num_bytes

    @property
    def _summed(self) -> int:
        """Bytes of a weight's gradient while it is added to the fp32 sums: itself, and cast if it is narrower."""
        return self.values + (4 if self.values < 4 else 0)

    @property
    def _embedding(self) -> int:
        return self.architecture.vocab_size // self.tp * self.architecture.hidden_size

    def count_head_working_bytes(self, tokens: IntArray, *, tied: bool) -> IntArray:
        """Count the bytes in addition to the kept ones while the head runs backwards: the gradient of its input, and
        for 4-byte values that of its weight (the gradient of the logits replaces the probabilities). For 2-byte values
        it is the gradient of the logits and, once the probabilities are freed, that of the weight.
        """
        vocab, v = self.architecture.vocab_size // self.tp, self.values
        gradient: IntArray = v * self.architecture.hidden_size * tokens
        if v == 4:
            return gradient + v * self._embedding
        summed = 0 if tied else self._summed * self._embedding - 4 * vocab * tokens
        weight = np.maximum(v * self._embedding + (v - 4) * vocab * tokens, summed)
        return gradient + np.maximum(v * vocab * tokens, weight)

    def count_embedding_working_bytes(self, *, tied: bool) -> int:
        """Count the bytes at a backward's end: the embedding's gradient, and that of a tied head or a cast."""
        return self._embedding * max(self._summed, 2 * self.values if tied else 0)

    def count_layer_working_bytes(
        self, tokens: IntArray, kept_bytes: IntArray, positions: IntArray, *, tied: bool
    ) -> IntArray:
        """Count the bytes in addition to `kept_bytes` while one layer runs backwards, at the fullest moment of its MLP.
        The moments are: the second product has its gradients; its weight's gradient is summed; the activation function
        has its gradient; then the first two again, of the first product. At each of them there are also recomputed
        activations, the gradients of the residual stream, and that of a tied embedding, which waits for the embedding.
        """
        a, tp, v = self.architecture, self.tp, self.values
        h, f, fc1 = a.hidden_size, a.ffn_hidden_size // tp, a.fc1_size // tp
        whole = self.count_layer_bytes(tokens, positions)
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

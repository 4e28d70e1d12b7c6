"""Bytes that Megatron's plain ("local") layers store: torch operators one by one, without fused kernels.

They are counted operator by operator, as `dynapipe train` runs on a CPU: more than fused kernels store."""

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
    """Return whether a model's plain layers are counted: not with experts, a decoder, latent attention or capped
    scores."""
    return not (a.num_experts or a.num_decoder_layers or a.attention_softcap or a.latent)


@dataclass(frozen=True, slots=True)
class PlainLayers:
    """Bytes of a decoder-only model, `base`, on one rank. `packed`: rows are packed, with one attention call per
    document."""

    base: AnalyticCosts
    packed: bool

    @property
    def _sizes(self) -> tuple[Architecture, int, int]:
        """The model, the tensor parallel ranks, and the bytes of a value."""
        return self.base.architecture, self.base.topology.tp, self.base.activation_bytes_per_value

    def count_bytes(self, features: Features, transfer_bytes: IntArray) -> tuple[IntArray, IntArray]:
        """Return the stored and the working bytes of micro-batches on every stage, (S, M) each.

        When B of a layer runs, the head's bytes are free again, and after all layers theirs, too."""
        a, tp, v = self._sizes
        tokens, positions, pieces = features.positions[0], features.shapes[1], features.pieces
        recompute, asks_chunks = split_kinds(features.recompute)
        is_chunked, is_full = self.base.needs_chunks(asks_chunks, tokens), recompute == "full"
        layers = self.base.layout.counts["encoder"]
        is_first, is_last = (np.arange(len(layers))[:, None] == stage for stage in (0, len(layers) - 1))
        whole = self._count_layer_bytes(tokens, positions)
        kept_bytes = np.where(is_full, self.base.split(v * a.hidden_size * tokens), whole)
        angles = 4 * a.head_dim if a.position == "rope" else 0  # fp32, kept once for all recomputed layers
        head = is_last * self._count_head_bytes(tokens, is_chunked)
        stored = layers * kept_bytes + (layers > 0) * is_full * angles * positions + head
        of_layer = (layers > 0) * (self._count_layer_working_bytes(tokens, whole, kept_bytes) - head)
        chunked = self.base.count_chunked_head_bytes(tokens)[1]
        of_head = is_last * np.where(is_chunked, chunked, self._count_head_working_bytes(tokens))
        # At a backward's end: the embedding's gradient, and that of a tied head or a cast.
        of_embedding = is_first * self._embedding * max(self._summed, 2 * v * self._is_tied) - stored
        working = np.maximum(np.maximum(of_layer, of_head), np.maximum(of_embedding, 0))
        own = pieces.own if pieces else np.zeros_like(tokens)
        stored = stored - layers * ~is_full * self._count_spared_bytes(own, recompute == "selective")
        stored, working = keep_input_bytes(recompute == "stage", stored, working, transfer_bytes)
        if pieces is None:
            return stored, working
        a_position = 2 * a.kv_size_on(tp)  # values that pieces keep for one another; a running one has gradients
        stored = stored + layers * (a_position * pieces.count_kept_bytes(v))
        return stored, working + (layers > 0) * (a_position * v * pieces.joined)

    def count_head_bytes(self, micro_batches: Sequence[MicroBatch]) -> IntArray:
        """Return the head's part of the last stage's stored bytes, (M,)."""
        features = Features.from_micro_batches(micro_batches)
        recompute, asks_chunks = split_kinds(features.recompute)
        positions = features.positions[0] * (recompute != "stage")
        return self._count_head_bytes(positions, self.base.needs_chunks(asks_chunks, positions))

    def _count_head_bytes(self, tokens: IntArray, is_chunked: BoolArray) -> IntArray:
        """Count the final norm, the head and the loss: fp32 probabilities of the full vocabulary, or chunks."""
        a, tp, _ = self._sizes
        chunks, _ = self.base.count_chunked_head_bytes(tokens)
        kept_bytes = np.where(is_chunked, chunks, 4 * a.vocab_size // tp * tokens)
        return np.asarray(kept_bytes + self.base.split(self._norm_bytes * tokens) + _IDS * tokens)

    def _count_layer_bytes(self, tokens: IntArray, positions: IntArray) -> IntArray:
        """Count the bytes of a layer from forward to backward without recomputation; `positions`: of one row."""
        a, tp, v = self._sizes
        # A norm after a product keeps an input of its own; its output is only added to the residual stream.
        norms = 2 * self._norm_bytes + (2 * (self._norm_bytes - a.hidden_size * v) if a.norm_placement == "both" else 0)
        mlp = (5 if a.gated_mlp else 2) * a.ffn_hidden_size // tp
        a_token = v * (self._attention_values + mlp) + 4 * a.num_heads // tp  # and the log-sum-exp, fp32
        tables = 4 * v * a.head_dim if a.position == "rope" else 0  # sine and cosine, of queries and of keys
        kept_bytes = (a_token + self._qk_norm_bytes) * tokens + self.base.split(norms * tokens) + tables * positions
        return kept_bytes + self._count_window_bytes(tokens, positions) if a.sliding_window else kept_bytes

    @property
    def _head_values(self) -> tuple[int, int, int]:
        """Values per token: of queries, of keys, and of both after rotary embedding."""
        a, tp, _ = self._sizes
        query, kv = a.query_size // tp, a.kv_size_on(tp)
        return query, kv, query + kv if a.position == "rope" else 0

    @property
    def _attention_values(self) -> int:
        """Values per token. Grouped: keys and values repeated for every head, and the queries. Else values are in the
        full output of qkv, and queries and keys after rotary embedding are separate. And the output, if packed twice.
        """
        a, (query, kv, turned) = self.base.architecture, self._head_values
        attended = 3 * query if a.num_query_groups < a.num_heads else query + 2 * kv + turned
        return attended + query * (2 if self.packed else 1)

    def _count_spared_bytes(self, own: IntArray, is_selective: BoolArray) -> IntArray:
        """Count what a layer saves on a piece's own positions, whose keys and values are in buffers. It only keeps
        their queries and outputs, as the softmax is computed again; if attention is recomputed, its inputs too.
        """
        (a, tp, v), (query, kv, turned) = self._sizes, self._head_values
        piece_values = 2 * query + is_selective * (2 * kv + turned)
        spared: IntArray = (v * (self._attention_values - piece_values) + 4 * a.num_heads // tp) * own
        return spared

    @property
    def _qk_norm_bytes(self) -> int:
        """Bytes per token of the norms of queries and keys: fp32 inputs and normalised values, statistics. Inputs of
        4-byte values are not copied, unless all heads are normalised at once; those of grouped heads are.
        """
        (a, tp, v), (query, kv, _) = self._sizes, self._head_values
        if not a.qk_norm:
            return 0
        if a.qk_norm_whole:
            return 8 * (query + kv) + 8
        copies = 8 if v < 4 else 12 if a.num_query_groups < a.num_heads else 4
        return copies * (query + kv) + 4 * (a.num_heads // tp + -(-a.num_query_groups // tp))

    def _count_window_bytes(self, tokens: IntArray, positions: IntArray) -> IntArray:
        """Count the bytes of a mean layer if some have windows: blocks of queries, each with the keys and values of its
        window (own copies if heads are grouped), its output and its mask. A packed row counts as one document.
        """
        (a, tp, v), window = self._sizes, self.base.architecture.sliding_window
        more = np.maximum(-(-positions // window) - 1, 0)  # blocks after the first
        rest = positions - more * window
        masks = window * window + (more - 1) * window * (2 * window - 1) + rest * (rest + window - 1)
        rows = tokens // np.maximum(positions, 1)
        again = 2 * rows * more * (window - 1) if a.num_query_groups < a.num_heads else 0
        whole = v * (a.query_size // tp * (tokens + again) + masks)
        return np.where(more > 0, whole * a.num_window_layers // a.num_layers, 0)

    @property
    def _norm_bytes(self) -> int:
        """Bytes of one norm per token: input, output, statistics; RMSNorm of 16-bit values is in fp32."""
        (a, _, v), h = self._sizes, self.base.architecture.hidden_size
        if a.norm == "layernorm":
            return 2 * h * v + 2 * v
        return (3 * h * v if v == 4 else 8 * h + h * v) + 4

    @property
    def _is_tied(self) -> bool:
        """Whether one stage has both ends of a tied vocabulary."""
        return self.base.architecture.tied_embeddings and self.base.num_stages == 1

    @property
    def _summed(self) -> int:
        """Bytes of a weight's gradient while it is added to the fp32 sums: itself, and cast if it is narrower."""
        return 4 if self.base.activation_bytes_per_value == 4 else 6

    @property
    def _embedding(self) -> int:
        a, tp, _ = self._sizes
        return a.vocab_size // tp * a.hidden_size

    def _count_head_working_bytes(self, tokens: IntArray) -> IntArray:
        """Count the bytes in addition to the kept ones while the head runs backwards: the gradient of its input, and
        for 4-byte values that of its weight (the gradient of the logits replaces the probabilities). For 2-byte values
        it is the gradient of the logits and, once the probabilities are freed, that of the weight.
        """
        (a, tp, v), embedding = self._sizes, self._embedding
        logits, gradient = a.vocab_size // tp * tokens, v * a.hidden_size * tokens
        if v == 4:
            return np.asarray(gradient + v * embedding)
        summed = 0 if self._is_tied else self._summed * embedding - 4 * logits
        return np.asarray(gradient + np.maximum(v * logits, np.maximum(v * embedding + (v - 4) * logits, summed)))

    def _count_layer_working_bytes(self, tokens: IntArray, whole: IntArray, kept_bytes: IntArray) -> IntArray:
        """Count the bytes in addition to `kept_bytes`, of `whole` ones, while one layer runs backwards, at the fullest
        moment of its MLP. The moments are: the second product has its gradients; its weight's gradient is summed; the
        activation function has its gradient; then the first two again, of the first product. At each of them there are
        also recomputed activations, the gradients of the residual stream, and that of a tied embedding, which waits for
        the embedding.
        """
        a, tp, v = self._sizes
        h, f, fc1 = a.hidden_size, a.ffn_hidden_size // tp, a.fc1_size // tp
        stream = v * h * tokens * np.where(whole > kept_bytes, 2, 1)  # the output of recomputation, too
        freed = (5 if a.gated_mlp else 2) * f
        moments = (
            v * f * (tokens + h),
            self._summed * f * h + 0 * tokens,
            v * fc1 * tokens,
            v * ((fc1 + h - freed) * tokens + fc1 * h),
            self._summed * fc1 * h - v * freed * tokens,
        )
        waiting = v * self._embedding if self._is_tied else 0
        return np.asarray(whole - kept_bytes + stream + np.max(moments, axis=0) + waiting)

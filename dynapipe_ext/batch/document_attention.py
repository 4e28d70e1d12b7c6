"""Attention for transformers models that restarts at each document, with its sliding windows and chunks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

from dynapipe_ext.errors import ConfigError, DataError

DOCUMENT_ATTENTION = "dynapipe_documents"


class Carried(Protocol):
    """A piece of a long sample while it runs through a stage: it caches keys and values, and sums their gradients."""

    def attend(
        self, layer: object, queries: Any, keys: Any, values: Any, attention: Callable[..., Any], *, recompute: bool
    ) -> Any:
        """Return `attention` of the piece's queries to all keys of its sample up to its end, (T, heads, D). Tensors are
        the piece's at attention module `layer`. With `recompute` the backward computes it again."""
        ...


class SharedRows(Protocol):
    """Rows of which this rank has one of `width` equal slices of positions, while attention needs all positions."""

    @property
    def width(self) -> int: ...

    def attend(
        self,
        layer: object,
        tensors: Sequence[Any],
        document_lengths: Sequence[int],
        attention: Callable[..., Any],
        *,
        carried: Any,
        recompute: bool,
    ) -> Any:
        """Return (P, B, heads, D) from `tensors`: queries, keys and values of this rank's P positions of B rows.
        `document_lengths` are those of each complete row. `attention` receives lists of documents' queries, keys and
        values, (positions, heads, D); queries are a document's last positions. `carried`: the piece (Carried) that is
        the first document, or None. With `recompute` the backward computes attention again."""
        ...


def register_document_attention() -> str:
    """Register `attn_implementation="dynapipe_documents"` with transformers; return that name.

    Work grows with the sum of squared document lengths; with a 4D mask it would grow with the squared row length.
    Sliding windows and chunks count from the start of each document. Any device; collate with attention="cu_seqlens".
    Models raise ConfigError for soft-capped scores, attention sinks and generation.
    """
    transformers = importlib.import_module("transformers")  # optional, so unknown to type checkers without it
    transformers.AttentionInterface.register(DOCUMENT_ATTENTION, _attend_documents)
    return DOCUMENT_ATTENTION


def _attend_documents(
    module: Any,
    query_BHSD: Any,
    key_BHSD: Any,
    value_BHSD: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: Any = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Any = None,
    carried: Carried | None = None,
    joined: SharedRows | None = None,
    **_: Any,
) -> tuple[Any, None]:
    """Attend within documents. Shapes: (B, heads, S, D) -> (B, S, heads, D); offsets in the flattened B x S.

    `carried` is the piece of a cut sample that the first document of a row is (see `Carried`), or None. With `joined`
    (see `SharedRows`) offsets are those of complete rows, of which the tensors are a slice.
    """
    from dynapipe_ext.batch.packed_attention import DocumentMask

    batch, _, row_len, _ = query_BHSD.shape
    width = 1 if joined is None else joined.width
    lengths = _read_document_lengths(cu_seq_lens_q, batch, row_len, key_BHSD.shape[2], width)
    if softcap is not None or s_aux is not None:
        raise ConfigError(
            f"{DOCUMENT_ATTENTION} has no soft cap ({softcap}) and no attention sinks:"
            ' use attn_implementation="sdpa" or "eager" with attention="positions"'
        )
    if chunk := _chunk_of(module):  # a position looks back to the start of its chunk: chunks are documents of their own
        lengths = [min(chunk, length - start) for length in lengths for start in range(0, length, chunk)]
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    if carried is not None and (sliding_window or chunk or not causal):
        raise ConfigError(
            f"{type(module).__name__} attends in windows ({sliding_window}) or chunks ({chunk}), or ahead, which pieces"
            " of a cut sample do not support: plan whole samples"
        )
    if joined is not None and not causal:
        raise ConfigError(
            f"{type(module).__name__} attends ahead, which context parallelism does not support: plan with width 1"
        )
    rule = DocumentMask(scale=scaling, is_causal=causal, window=sliding_window, dropout=dropout)
    return _attend(module, (query_BHSD, key_BHSD, value_BHSD), lengths, rule, carried, joined), None


def _attend(
    module: Any,
    tensors_BHSD: tuple[Any, Any, Any],
    lengths: list[int],
    rule: Any,
    carried: Carried | None,
    joined: SharedRows | None,
) -> Any:
    """Return the results of documents of `lengths`, (B, S, heads, D)."""
    import torch

    from dynapipe_ext.batch.packed_attention import DocumentOffsets, attend_documents, pick_kernel

    batch, heads, row_len, _ = tensors_BHSD[0].shape
    device = tensors_BHSD[0].device
    recompute = not rule.dropout and pick_kernel(tensors_BHSD[0], rule) is None

    def attend_each(*documents: Sequence[Any]) -> Any:
        queries, keys = (DocumentOffsets.of([len(x) for x in of], device) for of in documents[:2])
        q_THD, k_THD, v_THD = (of[0] if len(of) == 1 else torch.cat(list(of)) for of in documents)
        return attend_documents(q_THD, k_THD, v_THD, queries, rule, keys=keys)

    def attend_one(q_THD: Any, k_THD: Any, v_THD: Any) -> Any:
        return attend_each([q_THD], [k_THD], [v_THD])

    if joined is not None:
        slices_PBHD = [x.permute(2, 0, 1, 3) for x in tensors_BHSD]
        of_row = _get_row_lengths(lengths, sum(lengths) // batch)
        out_PBHD = joined.attend(module, slices_PBHD, of_row, attend_each, carried=carried, recompute=recompute)
        return out_PBHD.transpose(0, 1)
    documents = [x.transpose(1, 2).flatten(0, 1) for x in tensors_BHSD]
    outputs = []
    if carried is not None:
        own, *lengths = lengths
        q_THD, k_THD, v_THD = (x[:own] for x in documents)
        outputs = [carried.attend(module, q_THD, k_THD, v_THD, attend_one, recompute=recompute)]
        documents = [x[own:] for x in documents]
    if lengths:
        q_THD, k_THD, v_THD = documents
        outputs.append(attend_documents(q_THD, k_THD, v_THD, DocumentOffsets.of(lengths, device), rule))
    return torch.cat(outputs).reshape(batch, row_len, heads, -1)


def _get_row_lengths(lengths: list[int], row_len: int) -> list[int]:
    """Return the lengths of the first row's documents. Raises DataError unless all rows have the same ones."""
    ends = list(accumulate(lengths))
    own, num_rows = lengths[: ends.index(row_len) + 1] if row_len in ends else [], ends[-1] // row_len
    if own * num_rows != lengths:
        raise DataError(f"{num_rows} rows of {row_len} positions have different documents: pack single rows")
    return own


def _read_document_lengths(borders: Any, num_rows: int, row_len: int, num_keys: int, width: int) -> list[int]:
    """Return document lengths. Raises ConfigError without offsets or with cached keys; DataError for other rows."""
    if borders is None or num_keys != row_len:
        raise ConfigError(
            f"{DOCUMENT_ATTENTION} got no document offsets for rows of {row_len} positions (or a cache of"
            f' {num_keys}): collate with attention="cu_seqlens", and load the model with sdpa to generate'
        )
    lengths: list[int] = borders.diff().tolist()
    if sum(lengths) != num_rows * row_len * width:
        raise DataError(
            f"documents of {sum(lengths)} positions do not fill {num_rows} rows of {row_len}: collate again"
        )
    return lengths


def _chunk_of(module: Any) -> int | None:
    """Return the positions of a chunk if this layer attends in chunks (Llama 4), else None."""
    config = getattr(module, "config", None)
    size, kinds = getattr(config, "attention_chunk_size", None), getattr(config, "layer_types", None)
    return int(size) if size and kinds and kinds[module.layer_idx] == "chunked_attention" else None

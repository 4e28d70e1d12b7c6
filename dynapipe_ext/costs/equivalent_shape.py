"""The padded shape that a micro-batch is priced as by measurements of padded rows."""

from __future__ import annotations

from dynapipe_ext.batch.micro_batches import MicroBatch
from dynapipe_ext.costs.grid import Grid


def equivalent_shape(m: MicroBatch, grid: Grid | None) -> tuple[float, float, float]:
    """(rows, encoder_len, decoder_len), not always whole.

    A packed row of P positions with document attention is the padded shape with the same tokens and the same sum of
    squared lengths, P / L rows of length L = sum(l^2) / P: matrix products depend on the first and attention on the
    second. L never goes below the shortest row of `grid`, its layers' of all sides, so that many tiny documents cost
    their tokens; nor, on either side of pairs, above the longest row where no document does. Whole-row attention is one
    padded row of P positions.
    """
    encoder, decoder = m.encoder_len, m.decoder_len
    if m.layout == "padded" or m.attention == "row":
        return m.rows, encoder, decoder
    pad = (encoder - sum(s.encoder for s in m.samples)) + (decoder - sum(s.decoder for s in m.samples))
    squares = sum(s.tokens**2 for s in m.samples) + pad**2
    rows = (encoder + decoder) ** 2 / squares
    if grid:
        lengths = zip((encoder, decoder), grid.axes[1:], strict=False)
        rows = min([rows, *(length / float(axis[0]) for length, axis in lengths)])
    if grid and decoder:
        most_e, most_d = (float(axis[-1]) for axis in grid.axes[1:])
        if all(s.encoder <= most_e and s.decoder <= most_d for s in m.samples):
            rows = max(rows, encoder / most_e, decoder / most_d)
    rows = max(1.0, rows)
    return rows, encoder / rows, decoder / rows

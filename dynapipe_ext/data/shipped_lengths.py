"""Lengths to show plans with where nobody has data: figures of public instruction data, without their texts.

The percentiles of 28,759 samples, input and target together, in tokens of cl100k_base. The samples are from tasks under
open licences of Natural Instructions, P3 (as in self-instruct), CodeXGLUE, GSM8K, FLAN's chains of thought, CLINC150,
LLaMA-Factory's Alpaca demo, PubMedQA, SciSumm and QMSum. Half of them have at most 93 tokens, and 2 in 100 thousands.
"""

from __future__ import annotations

import numpy as np

from dynapipe_ext.batch.micro_batches import LengthArray, as_length_array

# fmt: off
PERCENTILES = (
    2, 8, 10, 11, 13, 16, 19, 23, 26, 29, 31, 33, 35, 37, 39, 40, 41, 43, 44, 45, 47, 48, 50, 51, 53,
    54, 55, 56, 58, 59, 61, 63, 65, 67, 69, 71, 73, 75, 77, 78, 79, 81, 82, 84, 85, 86, 87, 88, 90, 91,
    93, 95, 97, 99, 102, 105, 108, 111, 115, 118, 122, 126, 130, 134, 139, 144, 149, 153, 158, 163, 167, 172, 177, 182,
    188, 194, 200, 205, 211, 216, 222, 229, 236, 246, 256, 269, 281, 295, 314, 336, 361, 388, 420, 458, 483, 504, 560,
    999, 4362, 10346, 35764,
)  # of 0, 1, … 100 in 100 samples
# fmt: on
SOURCE = "percentiles of public instruction data (28,759 samples)"


def shipped_lengths(number: int, *, most: int) -> LengthArray:
    """So many lengths, drawn between the percentiles and cut at `most` tokens; always the same.

    >>> shipped_lengths(6, most=2048)[:, 0].tolist()
    [137, 55, 13, 9, 231, 396]
    """
    shares = np.random.default_rng(0).random(number)
    drawn = np.interp(shares, np.linspace(0, 1, len(PERCENTILES)), PERCENTILES)
    return as_length_array(np.clip(drawn.astype(np.int64), 1, most))

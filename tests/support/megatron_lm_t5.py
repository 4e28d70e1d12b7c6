"""Documents and arguments for Megatron-LM's pretrain_t5.py: a T5 that trains on a CPU in a second."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dynapipe_ext.data.indexed_dataset import bin_path, idx_path, token_dtype, write_index
from tests.support.megatron_lm_runs import ARGUMENTS, without

_NUM_WORDS = 200
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_T5 = """--encoder-num-layers 2 --decoder-num-layers 2 --encoder-seq-length 48 --decoder-seq-length 24
--max-position-embeddings 48 --kv-channels 8 --ffn-hidden-size 64 --position-embedding-type learned_absolute
--tokenizer-type BertWordPieceCase --legacy-tokenizer --vocab-extra-ids 20 --split 80,10,10"""
_OTHERWISE = (
    "num-layers", "seq-length", "max-position-embeddings", "position-embedding-type", "tokenizer-type", "vocab-size",
)  # fmt: skip


def t5_arguments(folder: Path) -> list[str]:
    """Of one pipeline rank, once its documents of random words are written to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary, data = folder / "vocab.txt", folder / "documents"
    vocabulary.write_text("\n".join([*_SPECIAL, *(f"word{i}" for i in range(_NUM_WORDS))]) + "\n")
    rng, dtype = np.random.default_rng(0), token_dtype(len(_SPECIAL) + _NUM_WORDS)
    lengths = rng.integers(10, 60, 80)
    bin_path(data).write_bytes(rng.integers(len(_SPECIAL), _NUM_WORDS, lengths.sum()).astype(dtype).tobytes())
    write_index(idx_path(data), dtype, lengths)
    return [*without(ARGUMENTS, *_OTHERWISE), *_T5.split(), "--vocab-file", str(vocabulary), "--data-path", str(data)]

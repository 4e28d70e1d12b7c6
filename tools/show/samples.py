"""A sample as text: what the model reads, and which part carries loss."""

from __future__ import annotations

from itertools import groupby

from rich.text import Text

from dynapipe_ext.data.dataset import TokenSample
from dynapipe_ext.data.preprocessing.encoders import Encoder
from dynapipe_ext.data.preprocessing.transformers_encoder import FolderEncoder


def sample_text(sample: TokenSample, encoder: Encoder) -> Text:
    """The sample as text with its special tokens. Targets are green, between ⟦ and ⟧.

    >>> import numpy as np
    >>> from dynapipe_ext.data.tokenizer import BytesTokenizer
    >>> print(sample_text(TokenSample(0, np.array([72, 105, 257, 33, 256]), 3), BytesTokenizer()))
    Hi⟨separator⟩⟦!⟨eos⟩⟧
    """
    text = Text()
    tokens = zip(sample.tokens.tolist(), sample.is_target.tolist(), strict=True)
    for is_target, run in groupby(tokens, key=lambda token: token[1]):
        spelt = _spelt([token for token, _ in run], encoder)
        text.append(f"⟦{spelt}⟧" if is_target else spelt, style="green" if is_target else "dim")
    return text


def _spelt(tokens: list[int], encoder: Encoder) -> str:
    if isinstance(encoder, FolderEncoder):
        return encoder.spell(tokens)
    names = {encoder.eos: "⟨eos⟩", encoder.separator: "⟨separator⟩"}
    parts = groupby(tokens, key=lambda token: names.get(token))
    return "".join(name * len(list(run)) if name else encoder.decode(run) for name, run in parts)

"""A sample as text: what the model reads, and which part carries loss."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import numpy.typing as npt
from rich.text import Text

from dynapipe_ext.data.dataset import TokenSample
from dynapipe_ext.data.preprocessing.encoders import Encoder
from dynapipe_ext.data.preprocessing.transformers_encoder import FolderEncoder


def sample_text(sample: TokenSample, encoder: Encoder) -> Text:
    """The sample as text with its special tokens. Targets are green, between ⟦ and ⟧. Of a pair the chosen answer with
    its prompt, then the rejected one with it, a line each.

    >>> import numpy as np
    >>> from dynapipe_ext.data.tokenizer import BytesTokenizer
    >>> print(sample_text(TokenSample(0, np.array([72, 105, 257, 33, 256]), 3), BytesTokenizer()))
    Hi⟨separator⟩⟦!⟨eos⟩⟧
    """
    if sample.num_first:
        return Text("\n").join(
            Text(f"{name}: ").append_text(_spelt_targets(sample.tokens[part], sample.is_target[part], encoder))
            for name, part in (("chosen", slice(sample.num_first)), ("rejected", slice(sample.num_first, None)))
        )
    return _spelt_targets(sample.tokens, sample.is_target, encoder)


def _spelt_targets(ids: npt.NDArray[np.int64], targets: npt.NDArray[np.bool_], encoder: Encoder) -> Text:
    text = Text()
    tokens = zip(ids.tolist(), targets.tolist(), strict=True)
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

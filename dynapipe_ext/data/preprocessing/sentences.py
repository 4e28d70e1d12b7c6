"""Texts to sentences, as Megatron-LM's preprocess_data.py has NLTK split them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from dynapipe_ext.errors import ConfigError

_MOST_CHARACTERS = 1_000_000  # that are split at once, as there
_NO_NLTK = "--split-sentences needs NLTK 3.9 or later: pip install 'nltk>=3.9'"
# Where NLTK's expression for the end of a sentence takes blanks: before what comes next, or with what came before.
_BLANKS_AFTER = (("(?=(?P<after_tok>", r"\s*(?=(?P<after_tok>"), (r"\s+(?P<next_tok>", "(?P<next_tok>"))


@lru_cache(maxsize=4)
def sentence_splitter(language: str, *, keep_newlines: bool = False) -> Callable[[str], list[str]]:
    """Splits by NLTK's Punkt of a language. With `keep_newlines` blanks after a sentence are a part of it. Errors:
    ConfigError without NLTK or its data."""
    try:
        from nltk.tokenize import punkt
    except ImportError:
        raise ConfigError(_NO_NLTK) from None
    if not hasattr(punkt, "PunktTokenizer"):
        raise ConfigError(_NO_NLTK)
    try:
        tokenizer = punkt.PunktTokenizer(language)
    except LookupError:
        raise ConfigError(
            f"--split-sentences: NLTK has no Punkt data of {language!r}: python -m nltk.downloader punkt_tab, or set"
            " NLTK_DATA to where it lies"
        ) from None
    if keep_newlines:
        expression = punkt.PunktLanguageVars._period_context_fmt
        for blanks, moved in _BLANKS_AFTER:
            if blanks not in expression:
                raise ConfigError("--keep-newlines: this NLTK ends sentences by another expression: leave it out")
            expression = expression.replace(blanks, moved)
        variables = type("BlanksAfter", (punkt.PunktLanguageVars,), {"_period_context_fmt": expression})
        tokenizer = punkt.PunktSentenceTokenizer(tokenizer._params, lang_vars=variables())

    def split(text: str) -> list[str]:
        parts = (text[start : start + _MOST_CHARACTERS] for start in range(0, len(text), _MOST_CHARACTERS))
        return [sentence for part in parts for sentence in tokenizer.tokenize(part)]

    return split

"""Values of flags that stand for settings, from the words of a command line."""

from __future__ import annotations

import argparse


def dtype(text: str) -> str:
    """A type of weights by torch's name or the short one.

    >>> dtype("bf16"), dtype("float16")
    ('bfloat16', 'float16')
    """
    return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(text, text)


def layer_counts(text: str) -> tuple[float, ...]:
    """Numbers of layers with commas, whole or in halves. On a command line spaces do as well.

    >>> layer_counts("8.5,8, 8.5,7")
    (8.5, 8, 8.5, 7)
    """
    parts = [part.strip().removesuffix(".0") for part in text.split(",")]
    wholes = [part.removesuffix(".5") for part in parts]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in wholes):
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers of layers, whole or in halves, like 8.5,7.5")
    counts = tuple(float(part) if "." in part else int(part) for part in parts)
    if not all(counts):
        raise argparse.ArgumentTypeError(f"{text!r} has a stage without layers: give each at least 0.5, like 8.5,7.5")
    return counts


def width(text: str) -> int | str:
    """What a flag says: auto, or how many data parallel ranks join.

    >>> width("auto"), width("4")
    ('auto', 4)
    """
    if text == "auto":
        return text
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} must be auto or a number of data parallel ranks, like 2")
    return int(text)


def number_or_word(text: str) -> float | str:
    """
    >>> number_or_word("2.5"), number_or_word("auto")
    (2.5, 'auto')
    """
    try:
        return float(text)
    except ValueError:
        return text


def betas(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be two numbers of 0 to below 1, like 0.9,0.999") from None

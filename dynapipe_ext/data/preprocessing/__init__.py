"""Corpora to token files, in several processes: `preprocess.preprocess` is the way in."""

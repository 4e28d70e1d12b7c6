"""Stages of transformers models. In: a config or a folder, and a rank. Out: its parts of the model, and their stage."""

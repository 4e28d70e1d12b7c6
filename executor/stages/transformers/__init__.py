"""Stages of transformers models. In: a config or a folder of weights, and a rank of a topology. Out: the parts of the
model that lie on the rank, their stage, their optimizer, and how they are saved.
"""

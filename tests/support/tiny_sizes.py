"""The sizes of a model that trains in milliseconds a step, as lines of `[model]` in a file of settings."""

TINY_SIZES = """\
hidden_size = 32
num_heads = 2
num_query_groups = 2
ffn_hidden_size = 64
"""

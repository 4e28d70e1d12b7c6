"""Stages of megatron-core. In: an `Architecture` and a rank. Out: model chunks, their optimizer, and the stage
that runs them.
"""

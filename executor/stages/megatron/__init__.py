"""Stages of megatron-core. In: an `Architecture` and a rank of a topology. Out: model chunks with their first
weights, their optimizer, and the stage that runs them by instructions.
"""

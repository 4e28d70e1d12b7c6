"""Stages whose gradients a DeepSpeed engine holds. In: parts of a model, or any torch module, and a ds_config. Out:
the engine of a rank, and the stage that runs plans through it.
"""

"""A wing for loops without a pipeline: batch samplers, packed rows, batches for inference. Users call its three
packages; training here does not, and someone who works on training need not open it.
"""

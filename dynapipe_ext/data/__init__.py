"""Training data. In: text or Megatron's `.bin/.idx`. Out: a folder of tokens with `lengths.npy`, memory-mapped as a
`TokenDataset`; global batches of sample indices by step; the arrays of a micro-batch. The loader, planner processes and
the commands `train` and `preprocess` call it.
"""

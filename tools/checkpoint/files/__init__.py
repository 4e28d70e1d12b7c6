"""Tensors in files, without unpickling. In: a safetensors file or one of `torch.save`. Out: plain values, and tensors
as the places where their bytes lie. Readers of every format call it.
"""

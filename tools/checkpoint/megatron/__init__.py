"""Megatron's checkpoints: torch_dist and `mp_rank_XX`. In: an iteration's folder. Out: groups of tensors by their
Hugging Face names, and back at any tensor and pipeline size. The converter calls `dist.py`, `legacy.py` and their
writers.
"""

"""Meta's Llama folders, read only. In: params.json beside consolidated shards. Out: groups of tensors by their Hugging
Face names. The converter calls `folder.py`.
"""

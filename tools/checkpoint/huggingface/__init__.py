"""Hugging Face's folders. In: config.json beside safetensors or .bin files. Out: groups of tensors, and back, with the
files that go along. The converter calls `folder.py`.
"""

"""DeepSpeed's checkpoints: ZeRO 0 to 3, universal, pipeline layers. In: the folder of a tag. Out: groups of tensors by
their Hugging Face names, and back to a universal checkpoint. The converter calls `reader.py` and `writer.py`.
"""

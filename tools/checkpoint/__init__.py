"""Checkpoints of one format to another. In: a folder that a format recognises. Out: a folder of another format, tensor
for tensor. `converter.py` joins any reader of `formats.py` with any writer; `dynapipe convert` calls it.
"""

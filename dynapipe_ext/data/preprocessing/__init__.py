"""Corpora to token files, in several processes, resumably. In: files of records and a tokenizer. Out: a dataset folder,
or Megatron's `.bin/.idx`. `preprocess.preprocess` is the way in; `dynapipe preprocess` calls it.
"""

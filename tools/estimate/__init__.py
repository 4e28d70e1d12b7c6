"""What a model needs on a cluster. In: an `Architecture`, a `Cluster` and lengths. Out: every way to train it that
fits, with its memory and step time, ranked. `ranking.py` is the entry, `answer.py` shows its result; `dynapipe
estimate` calls them.
"""

"""Values that describe a batch. In: lengths of samples, and ranks. Out: micro-batches, batch plans, topologies.
Everything downstream reads these values; nothing here decides.
"""

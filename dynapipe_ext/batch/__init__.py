"""What a batch is. In: lengths of samples, and ranks. Out: micro-batches, plans of a global batch, topologies.
Everything to the right reads these values; nothing here decides.
"""

"""Values that describe a batch. In: lengths of samples, and ranks. Out: micro-batches, batch plans, topologies. The
other packages read these values; nothing here decides."""

"""What micro-batches cost. In: micro-batches (rows, lengths, layout, recomputation). Out: `MicroBatchCosts`, seconds
and bytes on every stage as integers. Counted, measured and token models fill it alike; planning, schedules and
bounds read nothing else. Also what a stage holds before any micro-batch, on which devices.
"""

"""Costs of micro-batches. Input: micro-batches (rows, lengths, layout, recomputation). Output: `MicroBatchCosts`,
integer nanoseconds and bytes on every stage. Analytic, measured and token models all return it; planning, schedules and
bounds read nothing else. The package also counts the bytes of states on each stage and describes devices."""

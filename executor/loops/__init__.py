"""Adapters of training loops that are not ours, a file each. In: the loop as its users start it. Out: the same loop,
whose micro-batches our planning call cuts and whose steps our schedules run.

They import the loop where they are called, and use public calls of this package alone. Who writes a loop of their own
calls `plan_micro_batches` and `dynapipe_ext.megatron` instead.
"""

# By tests/bench/loops.py.
TRIED = {"verl": "0.9.1", "megatron-bridge": "0.3.1", "ms-swift": "4.6.0", "slime": "0.3.1", "torchtitan": "0.3.0"}

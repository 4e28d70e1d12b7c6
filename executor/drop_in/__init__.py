"""Inside Megatron's own training loops: what stands in the place of its schedules. In: the loop's `forward_step_func`,
data iterator and model chunks. Out: a step that ran by a proven plan, and what Megatron's schedule would have returned.

A room of its own beside `stages`, since here Megatron's loop calls us: it owns model, data, optimizer and logs, and we
call back. `dynapipe_ext.megatron` is its front door.
"""

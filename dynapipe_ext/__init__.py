"""Variable micro-batches, pipeline schedules and an instruction executor for 3D-parallel training."""

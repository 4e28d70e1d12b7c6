"""Settings of a run. In: TOML, flags, a DeepSpeed configuration. Out: one checked `TrainConfig`. `launch` asks."""

"""Settings of a run. In: TOML, flags of a command, a DeepSpeed configuration. Out: one `TrainConfig`, whose values
and bounds are checked. `launch` asks for it; what is planned and run depends on nothing else that a user says.
"""

"""What one rank does. In: a settled job, and the rank's place in its environment. Out: steps, checkpoints, events.
Forked ranks and those of torchrun (`-m dynapipe_ext.launch.rank`) come in here.
"""

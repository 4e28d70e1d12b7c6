"""From settings to processes. In: the command line, TOML and the environment. Out: ranks, a store, planner processes,
and what a run leaves. `cli.py` and, under torchrun, `rank` are the ways in.
"""

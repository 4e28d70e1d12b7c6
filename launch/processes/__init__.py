"""Processes of a job: forked ranks, torchrun agents, nodes, signals. In: what a rank does. Out: how the job ended."""

"""Processes of a job: ranks forked on this machine, agents of torchrun, launchers of other nodes, signals. In: what a
rank does. Out: how the job ended, and the first cause where it failed.
"""

"""Processes of a job: ranks forked on this machine, agents of torchrun, launchers of other nodes, and signals. In: what
a rank does. Out: how the job ended, with the first cause where it failed.
"""

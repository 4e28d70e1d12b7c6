"""Processes of a job: ranks forked on this machine, agents of torchrun, launchers of other nodes, signals, and the
environment (`env.py` alone reads and writes it). In: what a rank does. Out: how the job ended, with the first cause
where it failed.
"""

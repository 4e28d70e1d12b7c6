"""Keeps what a run has learned. In: a rank's model and optimizer, and where the run stands. Out: folders that hold
all of it, whole or not there at all, and their way back into ranks of any topology. Training loops call it.
"""

"""What people run beside a run: checkpoints, estimates, accounts, pictures, checks. In: files and values of the layers
to the left. Out: files and tables. The commands in `launch/commands` call it.
"""

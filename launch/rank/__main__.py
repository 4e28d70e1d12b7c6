"""`torchrun … -m dynapipe_ext.launch.rank`."""

from dynapipe_ext.launch.processes.signals import show_own_stacks

if __name__ == "__main__":
    show_own_stacks()  # before what takes its time to load
    from dynapipe_ext.launch.rank.rank_program import run_and_exit

    run_and_exit()

"""`torchrun … -m dynapipe_ext.launch.rank`."""

from dynapipe_ext.launch.rank.rank_program import run_and_exit

if __name__ == "__main__":
    run_and_exit()

"""How long a wait in a test may take. It is generous, for others may have the cores: what hangs is found by its stacks,
which `run_ranks`, jobs and pytest-timeout print at their limits."""

LIMIT_S = 480.0
SOON_S = 60.0  # what ends within 5 s where it has a core to itself

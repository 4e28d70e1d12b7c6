"""What one rank does. In: a settled job and the rank in its environment. Out: steps, checkpoints, events."""

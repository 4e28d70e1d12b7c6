"""A run's directory: claimed, filled, reported on, and the trained model made of it."""

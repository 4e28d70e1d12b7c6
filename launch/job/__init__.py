"""From settings to a settled job: its data, model, costs, planner and places. In: a `TrainConfig`. Out: values that
ranks and every command which plans start from. No ranks exist yet.
"""

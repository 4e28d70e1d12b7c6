"""Planning of steps. In: the sample lengths of a global batch and a cost model. Out: a `StepPlan`, which has
micro-batches, an order of actions for every replica, its prediction and bounds. `planner.py` is the way in; planner
processes call it."""

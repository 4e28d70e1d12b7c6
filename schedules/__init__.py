"""From lengths to a planned step. In: the sample lengths of a global batch and a cost model. Out: a `StepPlan`, micro-
batches and an order for every replica with its prediction and bounds. `planner.py` is the way in; planner processes
call it.
"""

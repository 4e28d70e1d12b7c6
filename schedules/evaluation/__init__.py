"""Evaluation of schedules. In: a `PipelineSchedule` and `MicroBatchCosts`. Out: its exact times, its bytes, whether it
can run at all, and bounds that no schedule beats. The planner judges with it what the search has found.
"""

"""Evaluation of schedules. In: a `PipelineSchedule` and `MicroBatchCosts`. Out: its exact times, its bytes, whether it
can run, and lower bounds of all schedules. The planner judges with it what the search has found."""

"""Plans from where they are made to the ranks. In: a planner and the order of global batches. Out: the `ExecutionPlan`
of this rank for each step, proven in line or by planner processes through the store. The loader calls it.
"""

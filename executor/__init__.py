"""From a planned step to one that has run. In: a `StepPlan`. Out: instructions of every rank, proven (`proof/`), handed
out (`plans/`, `store/`) and run (`engine.py`) by a Stage and a Transport, recorded as spans. Ranks and planner
processes call it.
"""

"""From samples to a step that has run. In: a planner and a batch. Out: a `ProvenStep`, the instructions of every rank
(`proven_step.py`), handed out (`plans/`, `store/`) and run (`engine.py`) by a Stage and a Transport, recorded as spans.
Ranks, planner processes and the commands that show plans call it.
"""

"""The joint search. In: proposals (where to cut the batch) under a limit in bytes. Out: cuts, recomputation, replicas
and order with the shortest simulated step. The planner calls `optimizer.py`; the native core is the twin of `joint.py`
and `dispatch.py`. `flow_shop.py` orders forwards alone.
"""

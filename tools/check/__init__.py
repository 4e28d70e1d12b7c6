"""Claims of a plan's file, worked out again by code that shares nothing with the planner. In: a dynapipe-plan/1 file
and lengths. Out: what holds and what does not. `dynapipe check-plan` calls `check_plan.py`.
"""

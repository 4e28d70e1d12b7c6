"""The published schedules, by name. In: numbers of ranks and micro-batches (for `cyclic`, costs and a limit). Out: a
`PipelineSchedule`. The planner asks for those that can be trained, `dynapipe show-schedule` for all.
"""

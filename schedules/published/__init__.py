"""The published schedules, by name. In: numbers of ranks and micro-batches (for `cyclic`, costs and a memory limit).
Out: a `PipelineSchedule`. The planner uses those of `PlanRules.schedule`, `dynapipe show-schedule` all."""

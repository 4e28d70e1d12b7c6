"""From settings to a settled job: data, model, costs, planner, places. All that plans asks here."""

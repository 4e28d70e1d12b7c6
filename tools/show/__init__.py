"""Plans, schedules and runs for people. In: a plan, a schedule or a trace. Out: text for a terminal, a page, a picture.
The commands `plan`, `show-schedule` and `train` call it.
"""

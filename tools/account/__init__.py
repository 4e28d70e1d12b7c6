"""What a run achieved. In: the figures of its steps. Out: `report.json` and its tables, FLOPs and the use of devices,
and the errors of a cost table. `dynapipe train`, `flops` and `profile` call it.
"""

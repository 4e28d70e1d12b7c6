"""What a run came to. In: the figures of its steps. Out: `report.json`, FLOPs and how well devices were used, and how
well a cost table knew. `dynapipe train`, `flops` and `profile` call it.
"""

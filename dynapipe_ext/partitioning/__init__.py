"""How a global batch is cut. In: sample lengths and what runs of them cost. Out: micro-batches, dealt to replicas.
`schedules/search/proposals.py` calls it for the starts of a search; nothing here knows of schedules.
"""

"""Partitions of a global batch. In: sample lengths, and costs of micro-batches. Out: micro-batches on replicas.
`schedules/search/proposals.py` calls it for the starts of a search; nothing here knows of schedules."""

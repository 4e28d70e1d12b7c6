"""The store of a job: an embedded server, or the one that a user names. Out: its address."""

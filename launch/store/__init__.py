"""The store of a job: an embedded server of this project, or the one that a user names. In: settings and flags. Out:
its address, and a server process that ends with its owner.
"""

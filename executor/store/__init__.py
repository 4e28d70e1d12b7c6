"""Bytes that processes share, by key. In: an address. Out: a `Store`: a Redis-compatible server, or memory of one
process. Plan sources and planner processes read and write it.
"""

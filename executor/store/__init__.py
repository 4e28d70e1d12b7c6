"""Bytes that processes share, by key. In: an address. Out: a `Store` (`open_store`), on a Redis-compatible server; in
one process its memory will do. Plan sources and planner processes read and write it.
"""

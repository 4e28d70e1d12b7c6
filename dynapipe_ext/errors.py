"""Every error that a user can cause, as one tree.

    DynaPipeError
    ├── ConfigError        a setting, flag or topology that cannot work
    ├── DataError          a file, sample or field that cannot be used
    ├── PlanError          no valid plan exists for this batch under these limits
    ├── VerificationError  a plan that would deadlock, leak a buffer or lose a message
    ├── StoreError         the Redis-compatible store is absent, refuses, or holds something forged
    └── ExecutionError     a rank that cannot go on: a peer is late, dead or out of step

Messages name the value, the bound and the next move. A command line turns these into one line and exit status 2.
"""

from __future__ import annotations


class DynaPipeError(Exception):
    """Base of all errors raised for reasons outside this package's own code."""


class ConfigError(DynaPipeError):
    """A setting, flag or topology that cannot work."""


class DataError(DynaPipeError):
    """A file, sample or field that cannot be used."""


class PlanError(DynaPipeError):
    """No valid plan exists for this batch under these limits."""


class VerificationError(DynaPipeError):
    """A plan that would deadlock, leak a buffer or lose a message."""


class StoreError(DynaPipeError):
    """The store is absent, refuses, timed out, or holds something that was not signed by this job."""


class ExecutionError(DynaPipeError):
    """A rank that cannot go on: a peer is late, dead or out of step."""

"""A plan's certificate for people: every bound of every replica, the bound of the batch, and what is left to gain."""

from __future__ import annotations

from rich.table import Table

from dynapipe_ext.schedules.judge.bounds import Certificate, ReplicaBounds
from dynapipe_ext.tools.check.plan_file import PlanFile
from dynapipe_ext.tools.wording import percent


def certificate_of_file(plan: PlanFile) -> Certificate | None:
    """The certificate in a plan's file, as claimed; None where it lacks a bound."""
    if any({"stage", "chain", "heads_tails"} - replica.bounds_s.keys() for replica in plan.replicas):
        return None
    replicas = []
    for replica in plan.replicas:
        told = {name: round(seconds * 1e9) for name, seconds in replica.bounds_s.items()}
        replicas.append(
            ReplicaBounds(
                stage_ns=told["stage"],
                chain_ns=told["chain"],
                heads_tails_ns=told["heads_tails"],
                byte_time_ns=told.get("byte_time"),
            )
        )
    return Certificate(
        makespan_ns=round(max(replica.makespan_s for replica in plan.replicas) * 1e9),
        replicas=tuple(replicas),
        batch_ns=None if plan.batch_bound_s is None else round(plan.batch_bound_s * 1e9),
        free_batch_ns=None if plan.free_batch_bound_s is None else round(plan.free_batch_bound_s * 1e9),
    )


def certificate_table(certificate: Certificate) -> Table:
    table = Table(title="Certificate: nothing ends before", title_justify="left", title_style="bold")
    table.add_column("")
    for dp_rank in range(len(certificate.replicas)):
        table.add_column(f"replica {dp_rank}", justify="right", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)

    def row(name: str, each: list[int | None]) -> None:
        known = [ns for ns in each if ns is not None]
        table.add_row(name, *map(_time, each), _time(max(known, default=None)))

    replicas = certificate.replicas
    row("busiest rank's work, with the least before and after", [r.stage_ns for r in replicas])
    row("longest chain of one micro-batch", [r.chain_ns for r in replicas])
    row("one rank at a time, preemptive", [r.heads_tails_ns for r in replicas])
    row("bytes x time under the limit", [r.byte_time_ns for r in replicas])
    row("any order of these micro-batches", [r.best_ns for r in replicas])
    idle = [""] * len(replicas)
    table.add_row("  the plan is above that by", *idle, percent(certificate.gap))
    table.add_row("any plan of this batch", *idle, _time(certificate.batch_ns))
    table.add_row("  the plan is above that by", *idle, percent(certificate.batch_gap))
    table.add_row("any plan, wherever layers live, with any memory", *idle, _time(certificate.free_batch_ns))
    return table


def _time(ns: int | None) -> str:
    """
    >>> _time(1_234_000_000), _time(50_000), _time(None)
    ('1.234 s', '0.05 ms', '-')
    """
    if ns is None:
        return "-"
    return f"{ns / 1e9:.3f} s" if ns >= 1_000_000_000 else f"{ns / 1e6:.2f} ms"

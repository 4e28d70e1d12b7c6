"""How good a plan is at the least: lower bounds of its makespan, of each replica's as planned and of any plan's.

A replica's bounds hold for every order of the micro-batches it was given; they say how good the schedule is. The batch
bound holds for every plan of the samples: any split, order, recomputation and replica. It says how good the plan is.
The free bound holds under any placement of stages and layers, too. It says what another shape of the pipeline could
still gain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.errors import PlanError
from dynapipe_ext.lengths import SampleLength
from dynapipe_ext.schedules.judge.batch_floor import batch_floor
from dynapipe_ext.schedules.judge.bounds import ReplicaBounds, replica_bounds

if TYPE_CHECKING:
    from dynapipe_ext.schedules.step_plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Bounds of a step in ns; entry d of `replicas` belongs to data-parallel rank d.

    `batch_ns`: no plan of these samples on so many replicas ends earlier under the same memory limit, whatever its
    split into padded micro-batches (into padded or packed ones, if the plan packs), order, recomputation and replicas;
    without split backwards, unless the plan has them; and of whole samples, unless the plan has long ones in pieces:
    then of either. None where no such bound is known: a cost model other than the four of this package, or samples cut
    at the ends of fixed rows. `free_batch_ns`: the same wherever layers live on as many ranks, with any memory: the
    least work of the samples over the ranks. `certify` leaves it to who shows it (`free_batch_ns`).
    """

    makespan_ns: int
    replicas: tuple[ReplicaBounds, ...]
    batch_ns: int | None
    free_batch_ns: int | None = None

    @property
    def bound_ns(self) -> int:
        """No order of these micro-batches can be faster: the largest bound of any replica."""
        return max((replica.best_ns for replica in self.replicas), default=0)

    @property
    def gap(self) -> float | None:
        """Makespan over `bound_ns`, less 1; None where nothing is to be done."""
        return _gap(self.makespan_ns, self.bound_ns)

    @property
    def batch_gap(self) -> float | None:
        """Makespan over `batch_ns`, less 1; None without that bound."""
        return _gap(self.makespan_ns, self.batch_ns)


def certify(
    step_plan: StepPlan,
    costs: CostModel,
    samples: Sequence[SampleLength],
    *,
    memory_limit_bytes: int | None = None,
    like: StepPlan | None = None,
) -> Certificate:
    """The certificate of a plan of `samples` under `costs`; without a limit there is no byte-time bound, and
    the batch bound is that without one. Replicas that still are those of a plan `like` this one, certified under the
    same limit, keep their bounds.

    Errors: PlanError if the weights alone exceed the limit, or a bound is above the makespan (a defect, never a plan).
    """
    known: dict[tuple[int, int], ReplicaBounds] = {}  # by whose schedule and costs they are of
    if like is not None and like.certificate is not None:
        before = zip(like.schedules, like.costs, like.certificate.replicas, strict=True)
        known = {(id(schedule), id(priced)): bounds for schedule, priced, bounds in before}
    pairs = list(zip(step_plan.schedules, step_plan.costs, strict=True))
    for schedule, priced in pairs:
        if (pair := (id(schedule), id(priced))) not in known:
            known[pair] = replica_bounds(
                schedule, priced, split=schedule.is_split, memory_limit_bytes=memory_limit_bytes
            )
    replicas = tuple(known[id(schedule), id(priced)] for schedule, priced in pairs)
    ranks, dp = step_plan.schedules[0].stage_ranks, len(step_plan.schedules)
    certificate = Certificate(
        makespan_ns=max(prediction.makespan_ns for prediction in step_plan.predictions),
        replicas=replicas,
        batch_ns=_least_ns(step_plan, costs, samples, ranks, dp, memory_limit_bytes),
    )
    for name, bound_ns in (("these micro-batches", certificate.bound_ns), ("this batch", certificate.batch_ns or 0)):
        if bound_ns > certificate.makespan_ns:
            raise PlanError(
                f"the plan of step {step_plan.batch.step} takes {certificate.makespan_ns} ns but no plan of {name} can"
                f" take less than {bound_ns} ns: it was priced by another cost model or limit; plan it again"
            )
    return certificate


def free_batch_ns(step_plan: StepPlan, costs: CostModel, samples: Sequence[SampleLength]) -> int | None:
    """A certificate's `free_batch_ns`: all work on one rank, over the number of ranks."""
    ranks = step_plan.schedules[0].stage_ranks
    work_ns = _least_ns(step_plan, costs, samples, (0,) * len(ranks), 1, None)
    return None if work_ns is None else work_ns // (len(set(ranks)) * len(step_plan.schedules))


def _least_ns(
    step_plan: StepPlan,
    costs: CostModel,
    samples: Sequence[SampleLength],
    stage_ranks: Sequence[int],
    dp: int,
    memory_limit_bytes: int | None,
) -> int | None:
    """The floor of all plans of the kind that this one is, on such ranks."""
    micro_batches = step_plan.batch.micro_batches
    pieces = any(m.attention == "carried" for m in micro_batches)
    if not pieces and sum(len(m.samples) for m in micro_batches) != len(samples):
        return None
    return batch_floor_ns(
        costs,
        samples,
        stage_ranks,
        dp=dp,
        split=any(schedule.is_split for schedule in step_plan.schedules),
        packed=any(m.layout == "packed" for m in micro_batches),
        pieces=pieces,
        memory_limit_bytes=memory_limit_bytes,
    )


def batch_floor_ns(
    costs: CostModel,
    samples: Sequence[SampleLength],
    stage_ranks: Sequence[int],
    *,
    dp: int,
    split: bool,
    packed: bool,
    pieces: bool = False,
    memory_limit_bytes: int | None = None,
) -> int | None:
    """No plan of these samples on `dp` replicas ends earlier, of whole ones or with `pieces` of either; None where that
    is not known, as for samples that are cut already."""
    if any(sample.start for sample in samples):
        return None
    floor = batch_floor(
        costs,
        [(s.encoder, s.decoder) for s in samples],
        stage_ranks,
        split=split,
        packed=packed,
        pieces=pieces,
        memory_limit_bytes=memory_limit_bytes,
    )
    return None if floor is None else floor.bound_ns(dp)


def with_bounds(plan: Mapping[str, Any], certificate: Certificate) -> dict[str, Any]:
    """A dynapipe-plan/1 object with the certificate in it: "bounds" of each replica's prediction, "batch_bound_s" and
    "free_batch_bound_s"."""
    replicas = []
    for raw, bounds in zip(plan["replicas"], certificate.replicas, strict=True):
        told = {
            "stage_s": bounds.stage_ns / 1e9,
            "chain_s": bounds.chain_ns / 1e9,
            "heads_tails_s": bounds.heads_tails_ns / 1e9,
        }
        if bounds.byte_time_ns is not None:
            told["byte_time_s"] = bounds.byte_time_ns / 1e9
        replicas.append({**raw, "predicted": {**raw["predicted"], "bounds": told}})
    whole = {"batch_bound_s": certificate.batch_ns, "free_batch_bound_s": certificate.free_batch_ns}
    return {**plan, "replicas": replicas, **{name: ns / 1e9 for name, ns in whole.items() if ns is not None}}


def _gap(makespan_ns: int, bound_ns: int | None) -> float | None:
    return makespan_ns / bound_ns - 1 if bound_ns else None

"""The bounds of a plan once more, from their definitions and by brute force: what `check_plan` holds claims against.

Shares no code with what makes certificates: every micro-batch's actions are laid out as one path, every sample's least
cost is sought over all shapes that could hold it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import LAYER_RECOMPUTES, RECOMPUTES, Recompute, with_sliced_head
from dynapipe_ext.costs.adjustments import AdjustedCosts
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.model import CostModel, MicroBatchCosts
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.costs.tokens import TokenCosts

FloatArray = npt.NDArray[np.float64]
ByteNeed = tuple[int, int]  # encoder, decoder positions of a sample
MachineJob = tuple[int, int, int]  # earliest start, duration, least time from its end to the micro-batch's end; ns
_Priced = AnalyticCosts | CostTable | TokenCosts | AdjustedCosts


def replica_bounds_ns(
    costs: MicroBatchCosts, stage_ranks: Sequence[int], *, split: bool, limit_bytes: int, forward_only: bool = False
) -> dict[str, int]:
    """stage, chain, heads_tails and byte_time in ns, as `ReplicaBounds` defines them; 0 without micro-batches.

    Under `forward_only` nothing follows the last stage's F, and there is no byte_time (0).
    """
    bounds = {"stage": 0, "chain": 0, "heads_tails": 0, "byte_time": 0}
    if not costs.num_micro_batches:
        return bounds
    jobs: dict[int, list[MachineJob]] = {rank: [] for rank in stage_ranks}
    byte_ns = dict.fromkeys(stage_ranks, 0)
    for m in range(costs.num_micro_batches):
        path = _path(costs, stage_ranks, m, split=split, forward_only=forward_only)
        for stage, (forward, gradient, weight) in enumerate(path):
            rank = stage_ranks[stage]
            if forward_only:
                jobs[rank].append(forward)
                continue
            jobs[rank] += [forward, gradient] + ([weight] if split else [])
            released = gradient[0] + gradient[1] + (weight[1] if split else 0)
            byte_ns[rank] += int(costs.stored_bytes[stage, m]) * (released - forward[0])
            running = forward[1] + (gradient[1] if costs.working_in == "FBI" else 0)
            byte_ns[rank] += int(costs.working_bytes[stage, m]) * running
    for rank, own in jobs.items():
        heads, durations, tails = zip(*own, strict=True)
        bounds["stage"] = max(bounds["stage"], min(heads) + sum(durations) + min(tails))
        bounds["chain"] = max(bounds["chain"], *(sum(job) for job in own))
        # The preemptive optimum is the largest over thresholds: jobs with at least that tail, run as they come in.
        for tail in set(tails):
            now = 0
            for head, duration, _ in sorted(job for job in own if job[2] >= tail):
                now = max(now, head) + duration
            bounds["heads_tails"] = max(bounds["heads_tails"], now + tail)
        static = sum(int(costs.static_bytes[s]) for s, r in enumerate(stage_ranks) if r == rank)
        if limit_bytes > static and not forward_only:
            spread = -(-byte_ns[rank] // (limit_bytes - static))
            bounds["byte_time"] = max(bounds["byte_time"], min(heads) + spread + (0 if split else min(tails)))
    return bounds


def _path(
    costs: MicroBatchCosts, stage_ranks: Sequence[int], m: int, *, split: bool, forward_only: bool
) -> list[tuple[MachineJob, MachineJob, MachineJob]]:
    """F, B (or I) and W of micro-batch m on each stage, were it alone; W, which B has in it, is 0 long if not split."""
    last = costs.num_stages - 1
    forward = [int(x) for x in costs.forward_ns[:, m]]
    weight = [int(x) if split else 0 for x in costs.weight_ns[:, m]]
    gradient = [int(b) - w for b, w in zip(costs.backward_ns[:, m], weight, strict=True)]
    moves = [int(costs.transfer_ns[s, m]) * (stage_ranks[s] != stage_ranks[s + 1]) for s in range(last)]
    back = [0] * last if forward_only else moves
    start_f, start_g, after_g = [0] * (last + 1), [0] * (last + 1), [0] * (last + 1)
    for s in range(1, last + 1):
        start_f[s] = start_f[s - 1] + forward[s - 1] + moves[s - 1]
    start_g[last] = start_f[last] + forward[last]
    for s in reversed(range(last)):
        start_g[s] = start_g[s + 1] + gradient[s + 1] + back[s]
    for s in range(last + 1):
        upward = back[s - 1] + gradient[s - 1] + after_g[s - 1] if s else 0
        after_g[s] = max(weight[s], upward)
    return [
        (
            (start_f[s], forward[s], start_g[s] + gradient[s] + after_g[s] - start_f[s] - forward[s]),
            (start_g[s], gradient[s], after_g[s]),
            (start_g[s] + gradient[s], weight[s], 0),
        )
        for s in range(last + 1)
    ]


@dataclass(frozen=True, slots=True)
class _Times:
    """Of shapes that can run: F, B (S, n), the chain (n,) and the rows (n,)."""

    forward: FloatArray
    backward: FloatArray
    chain: FloatArray
    rows: FloatArray

    def work(self, own: Sequence[int]) -> FloatArray:
        """Of one row on the rank with these stages."""
        return cast(FloatArray, (self.forward[own] + self.backward[own]).sum(axis=0) / self.rows)


def batch_bound_ns(
    costs: CostModel,
    needs: Sequence[ByteNeed],
    stage_ranks: Sequence[int],
    *,
    dp: int,
    split: bool,
    packed: bool,
    pieces: bool = False,
    limit_bytes: int | None = None,
) -> float | None:
    """The bound of every plan of samples of these lengths, whole ones or with `pieces` of them; None where none is
    known.

    Padded rows: the busiest replica has 1 / dp of the sum, over samples, of the least F + B a row over all shapes
    that cover the sample. On tables these have no more rows than fit the limit at the sample's own lengths: bytes are
    taken to grow with rows and lengths. Packed rows on tables: by the dual of the prices that `batch_floor` seeks. With
    pieces only the work of the longest sample on one rank takes the place of its chain.
    """
    if not needs:
        return None
    match costs:  # by their definitions: what a model says of its own floor is what is judged here
        case CostTable() if pieces and costs.pieces is None:
            return None
        case CostTable() if packed or pieces:
            return _packed_bound_ns(costs, needs, stage_ranks, dp=dp, split=split, pieces=pieces)
        case AnalyticCosts() if packed and costs.capacity_factor:
            return None  # capacities are rounded up for the row as a whole: no sample has a share of its own
        case AdjustedCosts(prices=AnalyticCosts() as counted) if packed and counted.capacity_factor:
            return None
        case AdjustedCosts() if costs.facts.forwards_alone:
            return None
        case CostTable() | AnalyticCosts() | TokenCosts() | AdjustedCosts(prices=AnalyticCosts() | TokenCosts()):
            return _padded_bound_ns(
                costs, needs, stage_ranks, dp=dp, split=split, pieces=pieces, limit_bytes=limit_bytes
            )
        case _:
            return None


def _padded_bound_ns(
    costs: _Priced,
    needs: Sequence[ByteNeed],
    stage_ranks: Sequence[int],
    *,
    dp: int,
    split: bool,
    pieces: bool,
    limit_bytes: int | None,
) -> float | None:
    """The bound from the least work a row of every sample; see `batch_bound_ns`."""
    table = costs if isinstance(costs, CostTable) else None
    ranks = [[s for s, r in enumerate(stage_ranks) if r == rank] for rank in sorted(set(stage_ranks))]
    # A stage that is recomputed whole is slower than one that is not, unless times were fitted.
    kinds = table.kinds if table else LAYER_RECOMPUTES
    if isinstance(costs, AdjustedCosts):
        kinds = RECOMPUTES + (with_sliced_head(RECOMPUTES) if costs.facts.slices_head else ())
    work, chain = np.zeros(len(ranks)), 0.0
    head, tail = np.full(len(ranks), np.inf), np.full(len(ranks), np.inf)
    counts = Counter(needs)
    most_rows = _most_rows(table, list(counts), stage_ranks, limit_bytes)
    for need, count in counts.items():
        shapes = {kind: _covering(table, need, len(needs), most_rows.get((need, kind))) for kind in kinds}
        times = _times(costs, shapes, split=split)
        if not len(times.rows):
            return None
        work += count * np.array([times.work(own).min() for own in ranks])
        head = np.minimum(head, [times.forward[: own[0]].sum(axis=0).min() for own in ranks])
        tail = np.minimum(tail, [times.backward[: own[0]].sum(axis=0).min() for own in ranks])
        of_ranks = [float((times.work(own) * times.rows).min()) for own in ranks]
        chain = max(chain, *of_ranks) if pieces else max(chain, float(times.chain.min()))
    if pieces:  # a piece may be as short as one position
        edge = _times(costs, {kind: np.ones((3, 1)) * [[1], [1], [0]] for kind in kinds}, split=split)
        head = np.array([edge.forward[: own[0]].sum(axis=0).min() for own in ranks])
        tail = np.array([edge.backward[: own[0]].sum(axis=0).min() for own in ranks])
    return max(chain, float((work / dp + head + (0 if split else tail)).max()))


def _most_rows(
    table: CostTable | None, needs: Sequence[ByteNeed], stage_ranks: Sequence[int], limit_bytes: int | None
) -> dict[tuple[ByteNeed, Recompute], int]:
    """The most rows of each sample's own lengths that fit by themselves; empty for want of a limit or a table.

    By halving, as bytes grow with rows; a shape that cannot run needs as good as infinitely many.
    """
    if limit_bytes is None or table is None:
        return {}
    static = table.count_static_bytes()
    beside = np.array([static[[r == rank for r in stage_ranks]].sum() for rank in stage_ranks])[:, None]
    encoder, decoder = np.array(needs, np.int64).T
    most_rows: dict[tuple[ByteNeed, Recompute], int] = {}
    for recompute in table.kinds:
        fit = np.zeros(len(needs), np.int64)
        too_many = np.full(len(needs), int(_points(table)[0][-1]) + 1)
        while (too_many - fit > 1).any():
            rows = (fit + too_many) // 2
            priced = table.evaluate_shapes(np.maximum(1, rows), encoder, decoder, recompute)
            fits = (priced.stored_bytes + priced.working_bytes + beside <= limit_bytes).all(axis=0)
            fit, too_many = np.where(fits, rows, fit), np.where(fits, too_many, rows)
        most_rows |= {(need, recompute): int(most) for need, most in zip(needs, fit, strict=True)}
    return most_rows


def _covering(table: CostTable | None, need: ByteNeed, num_samples: int, most_rows: int | None) -> FloatArray:
    """Shapes (3, n) with a least time, or time a row, over all that hold a sample: see `batch_bound_ns`."""
    if table is None:  # they grow with lengths: the sample's own are best
        return np.array([(rows, *need) for rows in range(1, num_samples + 1)], np.float64).T
    rows, encoder, decoder = _points(table)
    if most_rows is not None:
        rows = sorted({*(n for n in rows if n <= most_rows), *([float(most_rows)] if most_rows else [])})
    sides = ({n, *(x for x in axis if x > n)} for n, axis in zip(need, (encoder, decoder), strict=True))
    return np.array(list(itertools.product(rows, *map(sorted, sides))), np.float64).reshape(-1, 3).T


def _points(costs: CostTable) -> tuple[list[float], list[float], list[float]]:
    """Measured rows, encoder lengths and decoder lengths of any grid."""
    rows, encoder, decoder = set[float](), set[float](), set[float]()
    for (_, kind), grid in costs.grids.items():
        of_kind = {"encoder": (rows, encoder), "decoder": (rows, encoder, decoder)}
        sides = of_kind.get(kind, (rows, decoder if costs.has_decoder else encoder))
        for points, axis in zip(sides, grid.axes, strict=True):
            points.update(axis.tolist())
    return sorted(rows), sorted(encoder), sorted(decoder)


def _times(costs: _Priced, shapes: Mapping[Recompute, FloatArray], *, split: bool) -> _Times:
    """Prices of the shapes (3, n) of every recomputation, one after the other."""
    parts: list[list[FloatArray]] = [[], [], [], []]
    for recompute, every in shapes.items():
        priced = costs.evaluate_shapes(every[0], every[1], every[2], recompute)
        run = (priced.forward_ns < INFEASIBLE).all(axis=0)
        gradient = priced.input_ns if split else priced.backward_ns
        chain = (priced.forward_ns + gradient).sum(axis=0) + (priced.weight_ns[0] if split else 0)
        for part, values in zip(parts, (priced.forward_ns, priced.backward_ns, chain, every[0]), strict=True):
            part.append(np.asarray(values[..., run], np.float64))
    return _Times(*(np.concatenate(part, axis=-1) for part in parts))


def _packed_bound_ns(
    costs: CostTable, needs: Sequence[ByteNeed], stage_ranks: Sequence[int], *, dp: int, split: bool, pieces: bool
) -> float | None:
    """Of whole samples; with `pieces`, a square may also be had as two positions of a sample in two of them: then it
    costs half of what these take to attend."""
    rows, encoder, decoder = _points(costs)
    shapes = np.array(list(itertools.product(rows, encoder, decoder or [0])), np.float64).T
    best: dict[tuple[float, float], dict[str, float]] = {}
    ranks = {rank: [s for s, r in enumerate(stage_ranks) if r == rank] for rank in sorted(set(stage_ranks))}
    edges = dict.fromkeys(ranks, np.inf)
    for length in sorted(set(zip(shapes[1].tolist(), shapes[2].tolist(), strict=True))):
        here = shapes[:, (shapes[1] == length[0]) & (shapes[2] == length[1])]
        times = _times(costs, dict.fromkeys(costs.kinds, here), split=split)
        if len(times.rows):
            best[length] = {f"rank {rank}": float(times.work(own).min()) for rank, own in ranks.items()}
            best[length]["chain"] = float((times.chain / times.rows).min())
    if not best:
        return None
    times = _times(costs, dict.fromkeys(costs.kinds, shapes), split=split)
    for rank, own in ranks.items():
        edges[rank] = float(times.forward[: own[0]].sum(axis=0).min())
        edges[rank] += 0.0 if split else float(times.backward[: own[0]].sum(axis=0).min())

    def least(name: str, of: Iterable[ByteNeed], square_ns: float = np.inf) -> float:
        every = {length: cost[name] for length, cost in best.items()}
        return _least_mixture(every, list(of), costs.has_decoder, square_ns)

    if costs.pieces is None or not pieces:
        whole = max(least(f"rank {rank}", needs) / dp + edges[rank] for rank in ranks)
        return max(whole, *(least("chain", [need]) for need in set(needs)))
    pair = min(one.forward_ns.attended + one.backward_ns.attended for one in costs.pieces.by_recompute.values())
    pair /= costs.topology.width  # the ranks of a block share it
    square_ns = {rank: sum(costs.layout.attentions[own, 0]) * pair / 2 for rank, own in ranks.items()}
    whole = max(least(f"rank {rank}", needs, square_ns[rank]) / dp + edges[rank] for rank in ranks)
    return max(whole, *(least(f"rank {rank}", [need], square_ns[rank]) for rank in ranks for need in set(needs)))


def _least_mixture(
    cost: Mapping[tuple[float, float], float], needs: Sequence[ByteNeed], has_decoder: bool, square_ns: float
) -> float:
    """The cheapest mixture of rows of measured lengths with the tokens and the squared lengths of all these samples,
    and of squares by themselves.

    Two kinds of rows suffice, as there are two things to hold. Encoder-decoders: of four things, the dearest alone.
    """
    tokens, squares = sum(e + d for e, d in needs), sum((e + d) ** 2 for e, d in needs)
    if has_decoder:
        encoder, decoder = sum(e for e, _ in needs), sum(d for _, d in needs)
        held = [
            [(x, e) for (e, _), x in cost.items()],
            [(x, d) for (_, d), x in cost.items()],
            [(x, e + d) for (e, d), x in cost.items()],
            [(x, (e + d) ** 2) for (e, d), x in cost.items()],
        ]
        totals = (encoder, decoder, tokens, squares)
        return max(
            total * min(x / size for x, size in sizes if size) for total, sizes in zip(totals, held, strict=True)
        )
    lengths = [(length, x) for (length, _), x in cost.items()]
    mixtures = [x * max(tokens / length, squares / length**2) for length, x in lengths]
    for (a, cost_a), (b, cost_b) in itertools.combinations(lengths, 2):
        of_b = (squares - tokens * a) / (b * b - a * b)  # a rows_a + b rows_b = tokens, the same with squares
        of_a = (tokens - b * of_b) / a
        if of_a >= 0 and of_b >= 0:
            mixtures.append(of_a * cost_a + of_b * cost_b)
    for length, x in lengths:
        if square_ns < np.inf and (rest := squares - tokens * length) > 0:
            mixtures.append(x * tokens / length + square_ns * rest)
    return min(mixtures)

"""Our samplers beside the peers' rules, written from their descriptions, over files of lengths: one table.

    python tests/bench/samplers.py LENGTHS.npy ... [--out tests/bench/results/samplers.json] [--million]

    multipack          shuffled; as many samples a step as the longest-first rule fits into the ranks' bins (quadratic)
    multipack linear   the same by first-fit decreasing, the last unfinished step dropped
    first fit          shuffled, each sample into the first of the last thousand bins with room
    best fit           longest first, each into the fullest bin with room (best-fit decreasing)
    Karmarkar-Karp     shuffled runs of 0.9 of a step, split over the ranks by the largest differencing method
    sequential         shuffled, filled in order, a bin closed at the first sample that does not fit
    sorted fixed       sorted by length, as many samples a batch as fit if all were longest
    random fixed       shuffled, the same number

Columns: tokens over steps x ranks x cap; over the largest rank's tokens x ranks; over rows x longest. L2 lag of a step,
mean and largest. Largest over mean cost (squares) of the ranks in a step, mean and largest. Its excess over max(1,
largest sample's cost / mean), and the gap to `least_cost`, both of the worst step: where batches are full ("carried"),
the longest sample must share its batch with enough short ones to fill it, so that the excess has a floor above 1, and
the gap says how near the step is to that. `least_cost` is a lower bound too: no assignment need reach it.

CPU seconds of ours are the least of three. Bins of peers without ranks are dealt to ranks in order; steps that are not
full are dropped where the peer drops them.
"""

from __future__ import annotations

import argparse
import heapq
import json
import platform
import subprocess
import sys
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from dynapipe_ext.batching.sampling.epoch_plan import EpochPlan, Last, Objective, measure
from dynapipe_ext.batching.sampling.samplers import DistributedTokenBatchSampler
from dynapipe_ext.costs.model import IntArray
from dynapipe_ext.partitioning.balance import karmarkar_karp

Bins = list[list[int]]  # step x ranks + rank -> samples
Rule = Callable[[IntArray, int, int], Bins]


def shuffled(lengths: IntArray) -> list[int]:
    return np.random.default_rng(0).permutation(len(lengths)).tolist()


def full_steps(bins: Bins, num_ranks: int) -> Bins:
    return bins[: len(bins) // num_ranks * num_ranks]


def longest_first(samples: Sequence[int], lengths: list[int], num_ranks: int, cap: int) -> Bins | None:
    """Bins by longest processing time first; None if one is above the cap."""
    heap = [(0, rank) for rank in range(num_ranks)]
    bins: Bins = [[] for _ in range(num_ranks)]
    for i in sorted(samples, key=lambda i: -lengths[i]):
        load, rank = heap[0]
        if load + lengths[i] > cap:
            return None
        bins[rank].append(i)
        heapq.heapreplace(heap, (load + lengths[i], rank))
    return bins


def first_fit_decreasing(samples: Sequence[int], lengths: list[int], num_ranks: int, cap: int) -> Bins | None:
    """Bins by first fit, longest first; None if there are more than ranks."""
    rooms = np.full(num_ranks, cap, np.int64)
    bins: Bins = [[] for _ in range(num_ranks)]
    for i in sorted(samples, key=lambda i: -lengths[i]):
        fits = rooms >= lengths[i]
        rank = int(fits.argmax())
        if not fits[rank]:
            return None
        rooms[rank] -= lengths[i]
        bins[rank].append(i)
    return bins


def most_that_fit(lengths: IntArray, num_ranks: int, cap: int, pack: Callable[..., Bins | None]) -> Bins:
    """Steps of as many samples of the shuffled order as `pack` finds room for; the rest is dropped."""
    order, size = shuffled(lengths), lengths.tolist()
    sums, bins, start = np.cumsum(lengths[order]), [], 0
    while start < len(order):
        before = int(sums[start - 1]) if start else 0
        low, high = start, int(np.searchsorted(sums, before + num_ranks * cap, side="right"))
        found: Bins = []
        while low < high:
            middle = (low + high + 1) // 2
            trial = pack(order[start:middle], size, num_ranks, cap)
            if trial is not None:
                low, found = middle, trial
            else:
                high = middle - 1
        full = low < len(order) or pack is longest_first  # the balanced rule trains a last step that is not full
        if low - start < num_ranks or not full or not all(found):
            break
        bins += found
        start = low
    return bins


def multipack(lengths: IntArray, num_ranks: int, cap: int) -> Bins:
    return most_that_fit(lengths, num_ranks, cap, longest_first)


def multipack_linear(lengths: IntArray, num_ranks: int, cap: int) -> Bins:
    return most_that_fit(lengths, num_ranks, cap, first_fit_decreasing)


def first_fit(lengths: IntArray, num_ranks: int, cap: int) -> Bins:
    bins: Bins = []
    room = np.zeros(0, np.int64)
    rooms = np.zeros(len(lengths), np.int64)
    for i in shuffled(lengths):
        low = max(0, len(bins) - 1000)
        room = rooms[low : len(bins)]
        fits = room >= lengths[i]
        at = int(fits.argmax()) + low if fits.any() else len(bins)
        if at == len(bins):
            bins.append([])
            rooms[at] = cap
        bins[at].append(i)
        rooms[at] -= lengths[i]
    return full_steps(bins, num_ranks)


def pack_best_fit(lengths: IntArray, num_ranks: int, cap: int) -> Bins:
    bins: Bins = []
    rooms: list[tuple[int, int]] = []
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        at = bisect_left(rooms, (length, -1))
        room, number = rooms.pop(at) if at < len(rooms) else (cap, len(bins))
        if number == len(bins):
            bins.append([])
        bins[number].append(i)
        insort(rooms, (room - length, number))
    return full_steps(bins, num_ranks)


def karmarkar_karp_runs(lengths: IntArray, num_ranks: int, cap: int) -> Bins:
    order = shuffled(lengths)
    sums = np.cumsum(lengths[order])
    bins, start = [], 0
    while start < len(order):
        before = int(sums[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(sums, before + int(0.9 * num_ranks * cap), side="right")))
        run = order[start:stop]
        if len(run) >= num_ranks:
            groups = karmarkar_karp([int(lengths[i]) for i in run], num_ranks)
            bins += [[run[k] for k in group] for group in groups]
        start = stop
    return bins


def sequential(lengths: IntArray, num_ranks: int, cap: int) -> Bins:
    bins: Bins = [[]]
    used = 0
    for i in shuffled(lengths):
        if used + int(lengths[i]) > cap:
            bins.append([])
            used = 0
        bins[-1].append(i)
        used += int(lengths[i])
    return full_steps(bins, num_ranks)


def fixed(order: Sequence[int], lengths: IntArray, num_ranks: int, cap: int) -> Bins:
    size = max(1, cap // int(lengths.max()))
    return full_steps([list(order[k : k + size]) for k in range(0, len(order), size)], num_ranks)


PEERS: dict[str, Rule] = {
    "multipack": multipack,
    "multipack linear": multipack_linear,
    "first fit": first_fit,
    "best fit": pack_best_fit,
    "Karmarkar-Karp": karmarkar_karp_runs,
    "sequential": sequential,
    "sorted fixed": lambda n, r, c: fixed(np.argsort(n, kind="stable").tolist(), n, r, c),
    "random fixed": lambda n, r, c: fixed(shuffled(n), n, r, c),
}
OURS: tuple[tuple[str, Objective, Last], ...] = (
    ("ours, spread", "quadratic", "spread"),
    ("ours, carried", "quadratic", "carry"),
    ("ours, tokens", "tokens", "spread"),
    ("ours, padded", "padded", "spread"),
)


def row(name: str, plan: EpochPlan, lengths: IntArray, cap: int, cpu_s: float) -> dict[str, Any]:
    found = measure(plan, lengths, lengths * lengths, cap)
    used = np.add.reduceat(lengths[plan.samples], plan.starts[:-1])
    lost = 0 if name.startswith("ours") else int(lengths.sum()) - found.tokens
    return {
        "rule": name,
        "cpu_s": cpu_s,
        "dropped": lost / int(lengths.sum()),
        "largest": int(used.max()),
        **asdict(found),
    }


def compare(lengths: IntArray, num_ranks: int, cap: int, *, with_peers: bool = True) -> list[dict[str, Any]]:
    rows = []
    for name, objective, last in OURS:
        if last == "carry" and int(lengths.sum()) < num_ranks * cap:
            continue
        cpu_s = []
        for _ in range(3):  # the least of three: other work on the machine makes CPU seconds longer, never shorter
            start = time.process_time()
            sampler = DistributedTokenBatchSampler(
                lengths, max_tokens=cap, num_replicas=num_ranks, rank=0, objective=objective, last=last
            )
            cpu_s.append(time.process_time() - start)
        rows.append(row(name, sampler.plan, lengths, cap, min(cpu_s)))
    for name, rule in PEERS.items() if with_peers else ():
        start = time.process_time()
        bins = rule(lengths, num_ranks, cap)
        spent = time.process_time() - start
        bins = [group for group in bins if group] if len([g for g in bins if g]) == len(bins) else []
        if bins:
            starts = np.cumsum([0, *map(len, bins)]).astype(np.int64)
            samples = np.concatenate([np.array(group, np.int64) for group in bins])
            rows.append(row(name, EpochPlan(samples, starts, np.zeros(0, np.int64), num_ranks), lengths, cap, spent))
    return rows


def text(case: dict[str, Any]) -> str:
    lines = [
        f"{case['lengths']}: {case['num_samples']} samples, {case['num_ranks']} ranks x {case['cap']} tokens",
        f"  {'':18}{'steps':>7}{'effic.':>8}{'utiliz.':>8}{'padding':>8}{'lag avg':>9}{'max':>8}"
        f"{'ratio':>7}{'max':>7}{'excess':>8}{'gap':>8}{'dropped':>9}{'CPU s':>8}",
    ]
    for r in case["rows"]:
        lines.append(
            f"  {r['rule']:18}{r['num_steps']:7}{r['efficiency']:8.2%}{r['utilization']:8.2%}"
            f"{r['padding_efficiency']:8.2%}{r['l2_lag_mean']:9.0f}{r['l2_lag_max']:8.0f}{r['cost_ratio_mean']:7.3f}"
            f"{r['cost_ratio_max']:7.2f}{r['cost_excess_max']:8.4f}{r['cost_gap_max']:8.4f}{r['dropped']:9.2%}{r['cpu_s']:8.2f}"
            + (f"  above the cap: {r['largest']}" if r["largest"] > case["cap"] else "")
        )
    return "\n".join(lines)


def cases(files: Sequence[Path], *, million: bool) -> list[tuple[str, IntArray, int, int, bool]]:
    """(name, lengths, ranks, cap, with peers)."""
    found: list[tuple[str, IntArray, int, int, bool]] = []
    chat: IntArray | None = None
    for file in files:
        lengths = np.load(file).astype(np.int64)
        lengths = lengths.sum(axis=1) if lengths.ndim == 2 else lengths
        cap = max(32_768, int(lengths.max()))
        found.append((file.stem.removesuffix("_lengths"), lengths, 8, cap, True))
        chat = lengths if "openchat" in file.stem else chat
    for count, num_ranks in ((100_000, 8), (100_000, 64), (1_000_000, 1024)):
        tail = np.maximum(np.random.default_rng(0).lognormal(6, 1, count), 1).astype(np.int64)
        found.append(("lognormal", tail, num_ranks, int(tail.max()), count < 1_000_000))
    if million and chat is not None:
        for count, num_ranks in ((10**6, 8), (10**6, 1024), (10**7, 8), (10**7, 1024)):
            drawn = np.random.default_rng(0).choice(chat, count)
            found.append((f"openchat, drawn {count // 10**6}M", drawn, num_ranks, 32_768, False))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("lengths", nargs="*", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--million", action="store_true", help="also 1M and 10M lengths drawn from the openchat file")
    args = parser.parse_args(argv)
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    result: dict[str, Any] = {
        "format": "dynapipe-samplers/1",
        "machine": f"2-core {platform.machine()} VM",
        "date": date.today().isoformat(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "commit": commit.stdout.strip(),
        "timing": "ours: least of three runs; peers: one run",
        "cases": [],
    }
    for name, lengths, num_ranks, cap, with_peers in cases(args.lengths, million=args.million):
        rows = compare(lengths, num_ranks, cap, with_peers=with_peers)
        case = {"lengths": name, "num_samples": len(lengths), "num_ranks": num_ranks, "cap": cap, "rows": rows}
        result["cases"].append(case)
        print(text(case), flush=True)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

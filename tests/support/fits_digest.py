"""Prints digests of what is fitted to fixed measurements, and of plans by it, as JSON: equal on every processor."""

from __future__ import annotations

import hashlib
import json

import numpy as np

from dynapipe_ext.batch.micro_batches import MicroBatch
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.batching.inference.memory_training import fit_phases
from dynapipe_ext.batching.sampling.samplers import quadratic_coefficients
from dynapipe_ext.costs.measuring_time import TimedDevice
from dynapipe_ext.costs.profiled import Profile, ProfileRange, choose_and_measure, make_cost_table
from dynapipe_ext.costs.surface import Measured, ModelPart, compute_left_out_errors
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.schedules.planner import Planner

SHAPE = Architecture.gpt(
    num_layers=4,
    hidden_size=64,
    num_heads=4,
    num_query_groups=2,
    ffn_hidden_size=96,
    gated_mlp=True,
    vocab_size=256,
    max_seq_len=512,
    tied_embeddings=True,
    position="rope",
    norm="rmsnorm",
    bias=False,
)


def measure(part: ModelPart, m: MicroBatch, *, bytes_only: bool = False) -> Measured:
    """By a law that no polynomial follows, with scatter; of exact sums and products alone."""
    tokens, squares = m.padded_tokens, m.padded_tokens * m.encoder_len
    scatter = 1 + (tokens * 7919 % 101 - 50) / 1000
    forward_s = (2e-4 + 1e-6 * tokens + 2e-9 * squares) * (1 + tokens / (tokens + 500)) * scatter
    return Measured(forward_s, 2.5 * forward_s, 1.5 * forward_s, forward_s, 1000 * tokens, 1300 * tokens)


def found() -> dict[str, object]:
    within = ProfileRange(min_len=16, max_len=512, max_tokens=4096)
    profile = Profile()
    device = TimedDevice(measure)
    choose_and_measure(profile, device, within, error_target=0.0, most_shapes=14, go_on=lambda _profile: True)
    table = make_cost_table(profile, within, SHAPE, value_bytes=4)
    points = {(r, n): 1e-6 * r * n for r, n in [(1, 16), (1, 128), (8, 16), (8, 128), (4, 64)]}
    random = np.random.default_rng(0)
    lengths = random.integers(16, 500, 60).tolist()
    plan = Planner(Topology(pp=2), table.with_topology(Topology(pp=2))[0], memory_limit_bytes=1e9, seed=0).plan(lengths)
    return {
        "errors of shapes": [(shape, error) for shape, error in profile.find_errors(within).items()],
        "surface of the simplest fit": list(compute_left_out_errors(points).values()),
        "table": table.to_json(),
        "coefficients": quadratic_coefficients(table, [16, 100, 300, 512]),
        "plan": repr(plan),
    }


def phases() -> list[list[float]]:
    """Of a memory model, of a device whose peaks are those of two phases, with scatter; some batches did not fit."""
    shapes = [(1 + i * 37 % 60, 1 + i * 71 % 300, int(i % 3 > 0)) for i in range(70)]
    shapes_B4 = np.array([(r, n, r * n, padded) for r, n, padded in shapes])
    rows, longest, tokens, padded = shapes_B4.T.astype(np.float64)
    peak = np.maximum(1e5 + rows * (4e4 + 900 * longest), tokens * (1100 + (0.2 + 0.6 * padded) * longest))
    peak *= 1 + np.arange(70) * 31 % 17 / 500
    return fit_phases(shapes_B4, np.minimum(peak, 2e7), peak < 2e7, 2).tolist()


if __name__ == "__main__":
    values = {**found(), "phases": phases()}
    digests = {k: hashlib.sha256(json.dumps(v, sort_keys=True).encode()).hexdigest()[:16] for k, v in values.items()}
    print(json.dumps(digests))

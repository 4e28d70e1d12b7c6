"""Widths that were measured: exchanges and the tax of a block, from seconds to the prices of plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.blocks import BlockAttention
from dynapipe_ext.costs.codec import from_json, to_json
from dynapipe_ext.costs.grid import Grid
from dynapipe_ext.costs.links import Link
from dynapipe_ext.costs.measured_blocks import BlockTimes, MeasuredBlock, fit_link
from dynapipe_ext.costs.measuring_time import TimedDevice
from dynapipe_ext.costs.pieces import PairGrowth, PieceSurcharge, PieceSurcharges
from dynapipe_ext.costs.profiled import Profile
from dynapipe_ext.costs.surface import Measured, ModelPart
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.launch.job.configured import make_planner
from dynapipe_ext.settings.train_config import TrainConfig

SIZES = {"num_heads": 4, "num_query_groups": 2, "head_dim": 16}
FAST, SLOW = Link(1_000, 1e10), Link(40_000_000, 1e6)
BLOCKS = {width: MeasuredBlock(even=FAST, gathered=Link(9_000, 1e9), tax=0.25) for width in (2, 4, 8)}
ROW = MicroBatch((SampleLength(0, 1024),), "packed", pad_multiple=8)


def table(**changes: Any) -> CostTable:
    """Layers of 100 ns a token and 0.01 ns a square; heads of half of that."""
    points = [(r, n) for r in (1, 16) for n in (8, 256, 1024, 4096)]
    grids = {}
    for part, share in (("encoder", 1.0), ("postprocess", 0.5)):
        forward = {(r, n): share * (1e-4 * r * n + 1e-8 * r * n * n) for r, n in points}
        columns = {"forward_ms": forward, "backward_ms": {at: 2 * x for at, x in forward.items()}}
        columns |= {
            name: {(r, n): x * r * n for r, n in points} for name, x in (("stored_mb", 1e-3), ("peak_mb", 3e-3))
        }
        grids["none", part] = Grid.from_points(columns)
    growth = PairGrowth(attended=0.02)
    pieces = PieceSurcharge(forward_ns=growth, backward_ns=growth, working_bytes=PairGrowth(), own_bytes=0.0)
    fields: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "topology": Topology(pp=2, dp=16), "value_bytes": 4}
    fields |= {"pieces": PieceSurcharges(kept_values=64, by_recompute={"none": pieces}), "blocks": BLOCKS}
    fields |= {"parameter_bytes": {"encoder": 1e6, "embedding": 1e6}, "provenance": {"model": SIZES}}
    return CostTable(grids=grids, **fields | changes)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.floats(1e6, 1e12), st.integers(2, 9))
def test_a_link_is_found_again_in_what_exchanges_over_it_take(latency_ns: int, bytes_per_s: float, count: int) -> None:
    seconds = {4096 * 4**i: latency_ns * 1e-9 + 4096 * 4**i / bytes_per_s for i in range(count)}
    link = fit_link(tuple(seconds.items()))
    for num_bytes, took_s in seconds.items():
        assert link.latency_ns * 1e-9 + num_bytes / link.bytes_per_s == pytest.approx(took_s, rel=1e-3, abs=1e-9)


def test_the_tax_is_what_slices_take_beyond_their_share() -> None:
    times = BlockTimes(
        even_s=((10, 1e-6), (10**6, 1e-3)), gathered_s=((10, 2e-6), (10**6, 1e-3)), whole_s=4.0, slice_s=1.2
    )
    assert times.block(4).tax == pytest.approx(0.2)
    assert times.block(2).tax == 0.0  # faster than half: not cheaper than free
    assert from_json(BlockTimes, json.loads(json.dumps(to_json(times)))) == times
    assert times.find_errors(4).max() < 1e-2
    for damage in ({"whole_s": 0.0}, {"even_s": ((10, 1e-6),)}, {"gathered_s": ((10, 1e-6), (20, float("nan")))}):
        with pytest.raises(DataError, match="measure again"):
            replace(times, **damage)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="width '2' cannot be read"):
        Profile.from_json([], blocks={"2": {"even_s": 3}})


@pytest.mark.parametrize("width", [2, 4, 8])
def test_a_block_takes_its_share_with_the_tax_and_its_exchanges_over_measured_links(width: int) -> None:
    """Four heads: eight ranks gather keys and values in a third exchange."""
    one, wide = (costs.evaluate([ROW]) for costs in (table(), table().at_width(width)))
    block = BlockAttention.from_sizes(SIZES, Topology(width=width, dp=16))
    assert block is not None
    queries, keys = 2 * 64 / width, block.kept_values
    latency, rate = (2 * 1_000, 1e10) if width < 8 else (2 * 1_000 + 9_000, 1e9)
    exchange_ns = latency + 4 * 1024 * (width - 1) / width * (queries / 1e10 + keys / rate) * 1e9
    for name in ("forward_ns", "backward_ns"):
        got, whole = (getattr(costs, name) for costs in (wide, one))
        np.testing.assert_allclose(got, whole * 1.25 / width + 2 * exchange_ns, atol=2)  # two layers a stage


def test_pieces_of_a_block_have_the_tax_too() -> None:
    piece = MicroBatch((SampleLength(0, 1024, start=1024),), "packed", attention="carried")
    first = MicroBatch((SampleLength(0, 1024),), "packed", attention="carried")
    more = [
        costs.evaluate([first, piece]).forward_ns[:, 1] - costs.evaluate([ROW]).forward_ns[:, 0]
        for costs in (table(), table().at_width(2))
    ]
    np.testing.assert_allclose(more[1], more[0] * 1.25 / 2, atol=2)


def test_widths_that_were_not_measured_are_refused_with_the_command_that_measures_them() -> None:
    says = r"degree 16 has no price: this cost table has those of 2, 4, 8: .*dynapipe profile --widths 16"
    with pytest.raises(ConfigError, match=says):
        table().at_width(16)
    assert table(blocks={}).at_width(16).facts.priced_widths is None


def test_blocks_come_back_from_json_and_change_the_fingerprint() -> None:
    again = CostTable.from_json(json.loads(json.dumps(table().to_json())))
    assert again.blocks == BLOCKS
    assert again.fingerprint() == table().fingerprint() != table(blocks={}).fingerprint()
    assert "blocks" not in table(blocks={}).to_json()
    for damage in ({"tax": -1}, {"tax": "much"}, {"tax": float("nan")}, {"even": {}}, {"gathered": None}):
        raw = table().to_json()
        raw["blocks"]["2"] |= damage
        with pytest.raises((ConfigError, DataError), match=r"tax of a measured block|cost table cannot be read"):
            CostTable.from_json(raw)


@pytest.mark.parametrize(("link", "width"), [(FAST, 4), (SLOW, 1)])
def test_steps_take_a_width_where_measured_links_are_worth_it(link: Link, width: int) -> None:
    """Also of eight data parallel ranks, of which no block of all was measured."""
    blocks = {width: MeasuredBlock(even=link, gathered=link, tax=0.05) for width in (2, 4)}
    config = TrainConfig().with_values(
        topology={"tp": 1, "pp": 2, "dp": 8, "context_parallel": "auto"},
        plan={"layout": "packed", "pieces": "auto", "memory_limit_gb": 100.0, "effort": 100},
        model={"num_layers": 4, "hidden_size": 64},
    )
    planner = make_planner(config, table(blocks=blocks, topology=Topology(pp=2, dp=8)))
    assert planner.widths == (1, 2, 4)
    assert planner.plan([4096, *[64] * 16]).width == width


def test_a_limit_in_seconds_says_what_there_is_time_for(tmp_path: Path) -> None:
    now = [0.0]

    def measure(part: ModelPart, *_: MicroBatch, bytes_only: bool = False) -> Measured:
        now[0] += 12.0  # twice as long as twelve runs: a machine that others use
        return Measured(0.2, 0.3, 0.0, 0.0, 1, 1)

    spent = TimedDevice(measure, 64, 12.0, 100.0, lambda answer: answer, lambda: now[0])
    assert spent.expect_s("layer", ROW) == 0.0
    spent("layer", ROW)
    assert spent.expect_s("layer", ROW) == pytest.approx(12.0)
    long = MicroBatch((SampleLength(0, 4096),), "packed")
    assert spent.expect_s("layer", long) > 4 * 12.0
    assert spent.has_time(54.0, share=0.55)
    assert not spent.has_time(56.0, share=0.55)
    now[0] = 12.0 + 54.0
    assert not spent.has_time(2.0, share=0.55)
    assert spent.has_time(2.0)

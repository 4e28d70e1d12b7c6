"""The data loader with plans made in line: what a training loop sees, without a store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from dynapipe_ext.batch.micro_batches import LengthArray
from dynapipe_ext.batch.topology import ActivationFormat, Coordinates, ReplicaCollectives, Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.dataset import TokenSample
from dynapipe_ext.errors import ConfigError, DataError, PlanError
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.loader import DynaPipeDataLoader
from dynapipe_ext.executor.plans.channel import PlanDelivery
from dynapipe_ext.executor.store.opening import MemoryStore
from dynapipe_ext.schedules.planner import Planner


class CountingDataset:
    """Decoder-only samples of seeded lengths; remembers which were read."""

    def __init__(self, num_samples: int = 40, seed: int = 0, samples: str | None = "some") -> None:
        sizes = np.random.default_rng(seed).integers(4, 90, num_samples)
        self.lengths: LengthArray = np.stack([sizes, np.zeros_like(sizes), sizes], axis=1)
        self.read: list[int] = []
        self.samples_fingerprint = samples

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> TokenSample:
        self.read.append(index)
        return TokenSample(index, np.arange(self.lengths[index, 0] + 1) + index, 1)


def planner(*, pp: int = 2, dp: int = 2, **settings: Any) -> Planner:
    options = {"schedule": "1f1b", "format": ActivationFormat(16), "collectives": ReplicaCollectives(), **settings}
    return Planner(Topology(pp=pp, dp=dp), TokenCosts(pp), 1e12, **options)


def rank(dp_rank: int = 0, pp_rank: int = 0) -> Coordinates:
    return Coordinates(tp_rank=0, pp_rank=pp_rank, dp_rank=dp_rank)


def loader(
    dataset: CountingDataset | None = None, *, at: Coordinates | None = None, **settings: Any
) -> DynaPipeDataLoader:
    options = {"tokens_per_batch": 400, "coordinates": at or rank(), **settings}
    return DynaPipeDataLoader(dataset or CountingDataset(), options.pop("planner", planner()), **options)


def plans(loading: Iterator[tuple[Any, ExecutionPlan]]) -> list[ExecutionPlan]:
    return [plan for _, plan in loading]


def samples_of(plan: ExecutionPlan) -> list[int]:
    return [sample.index for micro_batch in plan.micro_batches for sample in micro_batch.samples]


def test_the_replicas_together_train_every_sample_once_an_epoch() -> None:
    dataset = CountingDataset()
    seen = [
        i for dp_rank in range(2) for plan in plans(iter(loader(dataset, at=rank(dp_rank)))) for i in samples_of(plan)
    ]
    assert sorted(seen) == list(range(len(dataset)))


def test_len_is_the_number_of_steps() -> None:
    loading = loader()
    assert len(loading) == len(list(loading)) > 2


def test_micro_batches_are_tensors_in_the_plans_order_and_shapes() -> None:
    for micro_batches, plan in loader():
        assert len(micro_batches) == len(plan.micro_batches) == plan.num_micro_batches[0]
        for tensors, planned in zip(micro_batches, plan.micro_batches, strict=True):
            assert isinstance(tensors["tokens"], torch.Tensor)
            assert tuple(tensors["tokens"].shape) == (planned.rows, planned.encoder_len)
            assert [int(row[0]) for row in tensors["tokens"]] == [sample.index for sample in planned.samples]


def test_only_samples_of_the_own_replica_are_read() -> None:
    dataset = CountingDataset()
    planned = [samples_of(plan) for plan in plans(iter(loader(dataset, at=rank(1))))]
    assert dataset.read == [i for step in planned for i in step]
    assert set(dataset.read) < set(range(len(dataset)))


def test_a_rank_without_need_of_data_reads_nothing_and_gets_the_borders_of_packed_documents() -> None:
    dataset = CountingDataset()
    loading = loader(dataset, at=rank(pp_rank=1), needs_data=False, planner=planner(layout="packed"))
    for micro_batches, plan in loading:
        for tensors, planned in zip(micro_batches, plan.micro_batches, strict=True):
            assert set(tensors) == {"cu_seqlens"}
            assert tensors["cu_seqlens"][-1] == planned.encoder_len
    assert all(
        micro_batch == {} for micro_batches, _ in loader(dataset, needs_data=False) for micro_batch in micro_batches
    )
    assert dataset.read == []


def test_a_collate_function_takes_the_place_of_the_default() -> None:
    def collate_fn(micro_batch: object, samples: list[TokenSample]) -> dict[str, Any]:
        return {"first": np.array([sample.index for sample in samples]), "count": len(samples)}

    for micro_batches, plan in loader(collate_fn=collate_fn):
        assert [i for tensors in micro_batches for i in tensors["first"].tolist()] == samples_of(plan)
        assert all(tensors["count"] == len(tensors["first"]) for tensors in micro_batches)


def test_steps_are_counted_over_epochs_and_each_iteration_is_the_next_epoch() -> None:
    loading = loader(shuffle=True)
    first, second = plans(iter(loading)), plans(iter(loading))
    assert [plan.step for plan in first + second] == list(range(len(first) + len(second)))
    assert samples_of(first[0]) != samples_of(second[0])
    assert loading.epoch == 2


def test_an_iteration_left_half_way_is_followed_by_the_next_epoch() -> None:
    loading = loader(shuffle=True)
    next(iter(loading))
    next(iter(loading))
    assert loading.state_dict() | {"lengths": "", "data": "", "rule": {}} == {
        "format": "dynapipe-loader/1",
        "epoch": 1,
        "step": 1,
        "global_step": 2,
        "lengths": "",
        "data": "",
        "rule": {},
        "order": None,
    }


def test_set_epoch_chooses_the_samples_of_the_global_batches() -> None:
    one, two = (loader(shuffle=True, planner=planner(dp=1)) for _ in range(2))
    list(one)
    two.set_epoch(1)
    for left, right in zip(plans(iter(one)), plans(iter(two)), strict=True):
        assert sorted(samples_of(left)) == sorted(samples_of(right))


@pytest.mark.parametrize("stop", [1, 3, "end"])
@pytest.mark.parametrize("told_epoch", [False, True])
def test_a_resumed_loader_goes_on_with_exactly_the_same_plans(stop: int | str, told_epoch: bool) -> None:
    whole = loader(shuffle=True, seed=5)
    expected = plans(iter(whole)) + plans(iter(whole))
    steps = len(loader(shuffle=True, seed=5)) if stop == "end" else int(stop)

    broken = loader(shuffle=True, seed=5)
    running = iter(broken)
    for _ in range(steps):
        next(running)
    state = json.loads(json.dumps(broken.state_dict()))

    resumed = loader(shuffle=True, seed=5)
    resumed.load_state_dict(state)
    if told_epoch:
        resumed.set_epoch(state["epoch"])
    found = plans(iter(resumed))
    found += [] if stop == "end" else plans(iter(resumed))
    assert found == expected[steps:]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"seed": 6}, "seed 5 but this one has 6"),
        ({"tokens_per_batch": 500}, "tokens_per_batch 400 but this one has 500"),
        ({"shuffle": False}, "shuffle"),
        ({"drop_last": True}, "drop_last"),
        ({"dataset": CountingDataset(seed=1)}, "lengths"),
        ({"dataset": CountingDataset(samples="others")}, "data 'some' but this one has 'others'"),
    ],
)
def test_a_state_of_other_data_or_settings_is_refused_by_name(changed: dict[str, Any], named: str) -> None:
    state = loader(shuffle=True, seed=5).state_dict()
    with pytest.raises(DataError, match=named):
        loader(**{"shuffle": True, "seed": 5, **changed}).load_state_dict(state)
    loader(CountingDataset(samples=None), shuffle=True, seed=5).load_state_dict(state)  # which cannot be told
    for none in ({}, None):
        with pytest.raises(DataError, match="loader state has format None"):
            loader().load_state_dict(none)  # type: ignore[arg-type]


def test_a_first_steps_sizes_are_kept_in_a_state_and_those_of_none_are_other_settings() -> None:
    sizes = {"tokens_per_batch": None, "batch_size": 5, "first_sizes": np.array([2, 3]), "shuffle": True, "seed": 5}
    running = loader(**sizes)
    next(iter(running))
    state = json.loads(json.dumps(running.state_dict()))
    again = loader(**sizes)
    again.load_state_dict(state)
    whole = loader(**sizes)
    assert list(map(samples_of, plans(iter(again)))) == list(map(samples_of, plans(iter(whole))))[1:]
    with pytest.raises(DataError, match=r"the saved loader has first_sizes \(2, 3\) but this one has None"):
        loader(**{**sizes, "first_sizes": ()}).load_state_dict(state)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("epoch", "step", "global_step") for value in (None, -1, "3", float("nan"), True)),
        ("lengths", None),
        ("rule", None),
        ("order", 3),
        *((name, "missing") for name in ("epoch", "step", "global_step", "lengths", "rule", "order")),
    ],
)
def test_a_state_with_a_key_that_is_missing_or_of_another_type_is_refused_by_name(name: str, value: Any) -> None:
    state = loader().state_dict()
    if value == "missing":
        del state[name]
    else:
        state[name] = value
    with pytest.raises(DataError, match=f"^{name} of the loader's state is "):
        loader().load_state_dict(state)


def test_another_topology_goes_on_with_the_same_global_batches() -> None:
    two = loader(shuffle=True)
    next(iter(two))
    one = loader(shuffle=True, planner=planner(pp=1, dp=1))
    one.load_state_dict(two.state_dict())
    other_half = loader(shuffle=True, at=rank(1))
    other_half.load_state_dict(two.state_dict())
    for plan, left, right in zip(plans(iter(one)), plans(iter(_resumed(two))), plans(iter(other_half)), strict=True):
        assert sorted(samples_of(plan)) == sorted(samples_of(left) + samples_of(right))


def _resumed(loading: DynaPipeDataLoader) -> DynaPipeDataLoader:
    again = loader(shuffle=True)
    again.load_state_dict(loading.state_dict())
    return again


class EpochSampler:
    """Every second sample, in an order that depends on the epoch."""

    def __init__(self, num_samples: int, salt: int = 0) -> None:
        self.num_samples, self.salt, self.epoch = num_samples, salt, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng([self.epoch, self.salt]).permutation(np.arange(0, self.num_samples, 2))
        return iter(order.tolist())


def test_a_samplers_order_defines_the_global_batches() -> None:
    sampler = EpochSampler(40)
    loading = loader(sampler=sampler, batch_size=6, tokens_per_batch=None, planner=planner(dp=1))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        order = list(sampler)
        batches = [sorted(order[i : i + 6]) for i in range(0, 20, 6)]
        assert len(loading) == len(batches) == 4
        assert [sorted(samples_of(plan)) for plan in plans(iter(loading))] == batches


def test_a_sampler_that_gives_another_order_at_resume_is_refused() -> None:
    loading = loader(sampler=EpochSampler(40))
    next(iter(loading))
    same, other = loader(sampler=EpochSampler(40)), loader(sampler=EpochSampler(40, salt=1))
    same.load_state_dict(loading.state_dict())
    assert len(plans(iter(same))) == len(loading) - 1
    other.load_state_dict(loading.state_dict())
    with pytest.raises(DataError, match="another order"):
        iter(other)


def test_drop_last_leaves_out_the_short_batch_only() -> None:
    kept = loader(batch_size=7, tokens_per_batch=None, planner=planner(dp=1))
    dropped = loader(batch_size=7, tokens_per_batch=None, planner=planner(dp=1), drop_last=True)
    assert (len(kept), len(dropped)) == (6, 5)
    assert plans(iter(dropped)) == plans(iter(kept))[:5]


def test_planning_in_line_is_exposed_and_counted() -> None:
    loading = loader()
    list(loading)
    assert loading.exposed_planning_s > 0


class Longer(CountingDataset):
    def __getitem__(self, index: int) -> TokenSample:
        return TokenSample(index, np.arange(self.lengths[index, 0] + 2), 1)


class Broken(CountingDataset):
    def __getitem__(self, index: int) -> TokenSample:
        raise OSError(f"disk gone at sample {index}")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: loader(Longer()),
            DataError,
            r"positions but the dataset's `lengths` say \d+: the rest would never be",
        ),
        (lambda: loader(Broken()), OSError, "disk gone"),
        (lambda: loader(collate_fn=lambda *_: []), DataError, "collate_fn gave list: it must map names to tensors"),
        (lambda: DynaPipeDataLoader([1, 2], planner(), batch_size=1), ConfigError, "list has no attribute `lengths`"),
        (
            lambda: DynaPipeDataLoader(CountingDataset(), planner(), batch_size=4),
            ConfigError,
            r"coordinates=topology\.coordinates",
        ),
    ],
    ids=["a sample longer than its length", "a broken dataset", "no mapping", "no lengths", "no coordinates"],
)
def test_what_a_dataset_or_a_collate_function_does_wrong_reaches_the_consumer(
    make: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        next(iter(make()))


def test_a_failure_of_planning_reaches_the_consumer() -> None:
    small = Planner(Topology(), TokenCosts(1), 10.0, schedule="1f1b", format=ActivationFormat(16))
    with pytest.raises(PlanError):
        next(iter(loader(planner=small)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 4}, "exactly one"),
        ({"tokens_per_batch": None}, "exactly one"),
        ({"tokens_per_batch": 0}, "at least 1"),
        ({"sampler": [0, 1], "shuffle": True}, "leave out shuffle"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"num_workers": 1.5}, "num_workers is 1.5 but must be an integer of 0 to 4096"),
        ({"collate_fn": 5}, "collate_fn is 5 but must be a function"),
        ({"shuffle": "no"}, "shuffle is 'no' but must be True, False or None"),
        ({"num_workers": 2, "delivery": PlanDelivery(prefetch_steps=1)}, "prefetch_steps is 1"),
        ({"num_workers": 2}, "num_workers=2 needs a store"),
        (
            {"num_workers": 2, "store": MemoryStore(), "delivery": PlanDelivery(plan_key=b"k" * 32)},
            "cannot reach a MemoryStore",
        ),
        (
            {"num_workers": 2, "store": MemoryStore(), "delivery": PlanDelivery(starts_planners=False)},
            r"pass PlanDelivery\(plan_key",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_next_move(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loader(**settings)


@pytest.mark.parametrize("value", [0, float("nan"), float("inf"), "9"])
def test_a_limit_of_waiting_for_plans_is_positive_and_ends(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"timeout_s is .* must be positive"):
        PlanDelivery(timeout_s=value)


@pytest.mark.parametrize(("num_ranks", "topology"), [(4, Topology()), (1, Topology(dp=2)), (4, Topology(dp=2))])
def test_a_rank_of_other_ranks_than_the_topologys_does_not_take_itself_for_the_first(
    num_ranks: int, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: num_ranks)
    wanted = f"the topology has {topology.world_size} ranks but torch.distributed knows of {num_ranks}: make them agree"
    with pytest.raises(ConfigError, match=wanted):
        DynaPipeDataLoader(CountingDataset(), Planner(topology, TokenCosts(1), 1e12), tokens_per_batch=400)

"""Adapters of other loops: what they cut, by the argument shapes of the loops themselves."""

from __future__ import annotations

import sys
from itertools import chain, pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError, PlanError
from dynapipe_ext.executor.drop_in.replaced import replaced
from dynapipe_ext.executor.loops import TRIED, megatron_bridge, ms_swift, slime, verl
from dynapipe_ext.executor.loops.counts import in_count
from dynapipe_ext.executor.loops.running_model import RunningModel
from dynapipe_ext.launch.commands import doctor

LENGTHS = [30, 7, 90, 12, 55, 8, 21, 64]
CAP = 128


@pytest.fixture
def pp2(monkeypatch: pytest.MonkeyPatch) -> RunningModel:
    config = SimpleNamespace(calculate_per_token_loss=True, variable_seq_lengths=False)
    model = RunningModel(
        topology=Topology(pp=2), costs=TokenCosts(2, overhead_ns=10**5), replicas=None, row_multiple=1, config=config
    )
    monkeypatch.setattr(RunningModel, "of", lambda *_: model)
    return model


def test_micro_batches_reach_a_count_by_halving_the_widest() -> None:
    found = in_count([[0, 1, 2, 3], [4, 5], [6]], [5, 5, 5, 5, 9, 9, 50], 5)
    assert found == [[0, 2], [1, 3], [4], [5], [6]]
    assert in_count([[0], [1]], [1, 1], 2) == [[0], [1]]
    with pytest.raises(PlanError, match="3 micro-batches are needed of 2 samples"):
        in_count([[0, 1]], [1, 1], 3)


def test_what_is_replaced_comes_back_after_an_error() -> None:
    owner = SimpleNamespace(one=1)

    def fails() -> None:
        with replaced(owner, one=2):
            assert owner.one == 2
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert owner.one == 1


class Rollouts(dict[str, Any]):
    """What verl's adapter reads of a TensorDict."""

    def __init__(self, lengths: list[int], **said: Any) -> None:
        super().__init__(
            input_ids=torch.nested.as_nested_tensor([torch.zeros(n) for n in lengths], layout=torch.jagged), **said
        )


class Engine:
    engine_config = SimpleNamespace(max_token_len_per_gpu=CAP)
    module = ()

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        module: Any = sys.modules["verl.workers.engine.megatron.transformer_impl"]
        return module.prepare_micro_batches(
            data=data,
            dp_group=None,
            num_batches_divided_by=loss_function,
            same_micro_num_in_dp=True,
            min_num_micro_batch=None,
        )[1]


@pytest.fixture
def verl_here(monkeypatch: pytest.MonkeyPatch, pp2: RunningModel) -> None:
    """Modules of verl's names, with what its adapter replaces and calls."""
    implementation: Any = ModuleType("transformer_impl")
    implementation.MegatronEngine = type("MegatronEngine", (Engine,), {})
    implementation.prepare_micro_batches = lambda **_: ([], "theirs")
    tensors: Any = ModuleType("tensordict_utils")
    tensors.get_non_tensor_data = lambda data, name, default: data.get(name, default)
    tensors.index_select_tensor_dict = lambda data, group: group
    for name in ("verl", "verl.workers", "verl.workers.engine", "verl.workers.engine.megatron", "verl.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "verl.workers.engine.megatron.transformer_impl", implementation)
    monkeypatch.setitem(sys.modules, "verl.utils.tensordict_utils", tensors)


def engine() -> Any:
    return sys.modules["verl.workers.engine.megatron.transformer_impl"].MegatronEngine()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("verl_here")
def test_verls_log_probabilities_are_cut_like_the_updates_that_follow() -> None:
    whole = Rollouts(LENGTHS, max_token_len_per_gpu=10**6)  # the sampler's own cap
    halves = [Rollouts(part, max_token_len_per_gpu=CAP) for part in (LENGTHS[:4], LENGTHS[4:])]
    with verl.planned_loop(mini_batch=4):
        forwards = engine().forward_backward_batch(whole, None, forward_only=True)
        updates = [engine().forward_backward_batch(half, None) for half in halves]
    expected = [*map(sorted, updates[0]), *([4 + i for i in sorted(group)] for group in updates[1])]
    assert sorted(map(sorted, forwards)) == sorted(expected)
    assert all(sum(LENGTHS[i] for i in group) <= CAP for group in forwards)
    assert sorted(i for group in forwards for i in group) == [*range(8)]


@pytest.mark.usefixtures("verl_here")
def test_verls_micro_batches_are_a_multiple_of_what_virtual_stages_take() -> None:
    with verl.planned_loop():
        assert len(engine().forward_backward_batch(Rollouts(LENGTHS, max_token_len_per_gpu=CAP), 4)) % 4 == 0


@pytest.mark.usefixtures("verl_here")
def test_verls_other_cuts_are_its_own_or_refused() -> None:
    with verl.planned_loop(mini_batch=3):
        fixed = Rollouts(LENGTHS, use_dynamic_bsz=False)
        assert engine().forward_backward_batch(fixed, None) == "theirs"
        with pytest.raises(ConfigError, match="force_group_size is 2"):
            engine().forward_backward_batch(Rollouts(LENGTHS, force_group_size=2), None)
        with pytest.raises(ConfigError, match="mini_batch is 3, which does not divide the 8"):
            engine().forward_backward_batch(Rollouts(LENGTHS), None, forward_only=True)
        with pytest.raises(PlanError, match="sample 2"):
            engine().forward_backward_batch(Rollouts(LENGTHS, max_token_len_per_gpu=80), None)
    with verl.planned_loop():
        assert engine().forward_backward_batch(fixed, None) == "theirs"


def packed_rows(rows: list[list[int]], width: int) -> dict[str, Any]:
    """As GPTSFTPackedDataset collates: documents of these lengths, then one segment of padding."""
    batch: dict[str, Any] = {name: torch.zeros(len(rows), width, dtype=torch.int64) for name in megatron_bridge._ROWS}
    ends = torch.full((len(rows), max(map(len, rows)) + 3), -1, dtype=torch.int32)
    for i, lengths in enumerate(rows):
        real = sum(lengths)
        for place, name in enumerate(megatron_bridge._ROWS):
            batch[name][i, :real] = 1 + torch.arange(real) + 1000 * i + 100_000 * place
        borders = [*torch.tensor([0, *lengths]).cumsum(0).tolist(), *([width] if real < width else [])]
        ends[i, : len(borders)] = torch.tensor(borders)
    argmin = ends.argmin(dim=1, keepdim=True)
    return {**batch, "cu_seqlens": ends, "cu_seqlens_argmin": argmin, "token_count": [sum(row) for row in rows]}


def test_megatron_bridges_documents_are_packed_anew_without_padding(pp2: RunningModel) -> None:
    rows = [[30, 7, 90], [12, 55, 8], [21, 64], [CAP]]
    batch = packed_rows(rows, CAP)
    found = megatron_bridge._Step(pp2, CAP, None).cut(batch)
    before = sorted(int(n) for n in batch["labels"].flatten() if n)
    assert sorted(int(n) for one in found for n in one["labels"].flatten()) == before
    for one in found:
        ends = one["cu_seqlens"][0, : int(one["cu_seqlens_argmin"])].tolist()
        assert (ends[0], ends[-1]) == (0, one["tokens"].numel())
        assert one["cu_seqlens"][0, -1] == -1
        assert one["tokens"].numel() == one["token_count"][0] <= CAP
        for first, end in pairwise(ends):  # a document stays together
            assert (one["tokens"][0, first:end].diff() == 1).all()
    assert pp2.config.variable_seq_lengths


def test_megatron_bridges_rows_are_padded_to_what_tensor_parallel_ranks_share() -> None:
    documents = [{name: torch.arange(1, 6) for name in megatron_bridge._ROWS}]
    row = megatron_bridge._row(documents, 4)
    assert row["tokens"].tolist() == [[1, 2, 3, 4, 5, 0, 0, 0]]
    assert row["cu_seqlens"].tolist() == [[0, 5, 8, -1]]


def test_megatron_bridge_needs_a_loss_that_no_plan_changes(pp2: RunningModel) -> None:
    pp2.config.calculate_per_token_loss = False
    with pytest.raises(ConfigError, match="calculate_per_token_loss is False"):
        megatron_bridge._Step(pp2, CAP, None).cut(packed_rows([[5]], 8))
    pp2.config.calculate_per_token_loss = True
    with pytest.raises(ConfigError, match="pad_seq_to_mult"):
        megatron_bridge._Step(pp2, CAP, None).cut({"cu_seqlens_unpadded": None})


def test_megatron_bridges_schedule_is_told_how_many_micro_batches_there_are(pp2: RunningModel) -> None:
    step = megatron_bridge._Step(pp2, CAP, None)
    told = step.counting(lambda num_microbatches, seq_length: (num_microbatches, seq_length))
    assert told(num_microbatches=9, seq_length=1) == (9, 1)
    found = step.cut(packed_rows([[30, 7, 90], [12, 55, 8]], CAP))
    assert told(num_microbatches=9, seq_length=1) == (len(found), 1)


class SwiftTrainer:
    """What ms-swift's adapter reads of a trainer, whose step returns the rows that it is given."""

    def __init__(self, **changes: Any) -> None:
        usual = {
            "padding_free": True,
            "task_type": "causal_lm",
            "calculate_per_token_loss": True,
            "micro_batch_size": 2,
        }
        usual |= {"context_parallel_size": 1, "enable_channel_loss": False, "seq_length": CAP // 2}
        usual |= {"pipeline_model_parallel_size": 2, "num_microbatches": 4}
        self.args, self.wrapped_models = SimpleNamespace(**{**usual, **changes}), [None]
        self.template = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=7))

    def train_step(self, data: Any) -> list[Any]:
        return [next(data) for _ in range(self.args.num_microbatches)]


@pytest.fixture
def swift_here(monkeypatch: pytest.MonkeyPatch, pp2: RunningModel) -> Any:
    """ms-swift's trainer under its name; rows are padded to a multiple of 4."""
    trainers, base = ModuleType("trainer"), ModuleType("base")
    trainers.MegatronTrainer = type("MegatronTrainer", (SwiftTrainer,), {})  # type: ignore[attr-defined]
    base.get_padding_to = lambda args: 4  # type: ignore[attr-defined]
    for name in ("swift", "swift.megatron", "swift.megatron.trainers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "swift.megatron.trainers.trainer", trainers)
    monkeypatch.setitem(sys.modules, "swift.megatron.trainers.base", base)
    return trainers.MegatronTrainer  # type: ignore[attr-defined]


def swift_row(lengths: list[int], first: int) -> dict[str, Any]:
    """As the template's collator leaves it: samples end to end, then padding to a multiple of 4."""
    real, padding = sum(lengths), -sum(lengths) % 4
    positions = torch.cat([*(torch.arange(n) for n in lengths), torch.zeros(padding, dtype=torch.int64)])
    tokens = torch.cat([first + torch.arange(real), torch.full((padding,), 7)])
    labels = torch.cat([-first - torch.arange(real), torch.full((padding,), -100)])
    return {"input_ids": tokens[None], "labels": labels[None], "position_ids": positions[None], "seq_lens": lengths}


SWIFT_ROWS = [LENGTHS[i : i + 2] for i in range(0, 8, 2)]


def test_ms_swifts_samples_are_packed_anew_and_each_stays_as_it_is(swift_here: Any) -> None:
    rows = [swift_row(lengths, 1000 * (i + 1)) for i, lengths in enumerate(SWIFT_ROWS)]
    trainer, data = swift_here(), iter([*rows, "the next step's"])
    with ms_swift.planned_loop():
        found = trainer.train_step(data)
    assert next(data) == "the next step's"
    assert trainer.args.num_microbatches == 4
    assert sorted(n for row in found for n in row["seq_lens"]) == sorted(LENGTHS)
    tokens = torch.cat([row["input_ids"][0] for row in found])
    assert sorted(tokens[tokens >= 1000].tolist()) == sorted(
        n for row in rows for n in row["input_ids"][0].tolist() if n != 7
    )
    for row in found:
        assert row["input_ids"].numel() == -(-sum(row["seq_lens"]) // 4) * 4 <= CAP
        real = row["input_ids"] >= 1000
        assert (row["labels"][real] == -row["input_ids"][real]).all()
        assert (row["labels"][~real] == -100).all()
        at = 0
        for length in row["seq_lens"]:
            assert row["position_ids"][0, at : at + length].tolist() == [*range(length)]
            assert (row["input_ids"][0, at : at + length].diff() == 1).all()
            at += length


def test_ms_swifts_virtual_stages_read_the_same_rows(swift_here: Any) -> None:
    trainer = swift_here()
    trainer.wrapped_models = [None, None]
    trainer.train_step = lambda data: data
    rows = [swift_row(lengths, 1000 * (i + 1)) for i, lengths in enumerate(SWIFT_ROWS)]
    count, iterators = ms_swift._planned(trainer, [iter(rows), iter(rows)], 0, 4)
    first, second = ([row["input_ids"].tolist() for row in iterator] for iterator in iterators)
    assert first == second
    assert len(first) == count
    assert count % 2 == 0


def test_ms_swifts_other_rows_are_its_own_or_refused(swift_here: Any) -> None:
    own = ["own"] * 4
    with ms_swift.planned_loop():
        assert swift_here(padding_free=False).train_step(iter(own)) == own
        assert swift_here(task_type="seq_cls").train_step(iter(own)) == own
        assert type("Preferences", (swift_here,), {})().train_step(iter(own)) == own
        refused = {"calculate_per_token_loss": False, "context_parallel_size": 2, "enable_channel_loss": True}
        for name, value in refused.items():
            with pytest.raises(ConfigError, match=f"{name}"):
                swift_here(**{name: value}).train_step(iter(own))
        images = {**swift_row([5], 1000), "pixel_values": None}
        with pytest.raises(ConfigError, match="a batch has pixel_values"):
            swift_here(num_microbatches=1).train_step(iter([images]))
        with pytest.raises(PlanError, match="sample 0"):
            swift_here(num_microbatches=1).train_step(iter([swift_row([CAP + 1], 1000)]))
    assert swift_here().train_step(iter(own)) == own


@pytest.fixture
def slime_here(monkeypatch: pytest.MonkeyPatch) -> Any:
    """slime's module under its name; what its own function would be asked."""
    schedules: Any = ModuleType("dp_schedule")
    schedules.build_dp_schedule = lambda *_, **__: "theirs"
    for name in ("slime", "slime.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "slime.utils.dp_schedule", schedules)
    return schedules


def slime_schedule(
    schedules: Any, lengths: list[int], *, vpp: int = 1, cp: int = 1, size: int = 4, **asked: Any
) -> Any:
    usual = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": CAP}
    args = SimpleNamespace(**{**usual, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2, **asked})
    parallel = {"dp_size": 2, "cp_size": cp, "vpp_size": vpp, "microbatch_group_size_per_vp_stage": 2}
    rollouts = [i // 2 for i in range(len(lengths))]  # two samples each
    return schedules.build_dp_schedule(args, parallel, lengths, global_batch_size=size, rollout_indices=rollouts)


def test_slimes_schedule_holds_what_its_own_promises(slime_here: Any) -> None:
    lengths = [*LENGTHS, *LENGTHS[::-1], 30, 30]  # two steps of four rollouts, and one rollout too many
    with slime.planned_schedules(costs=TokenCosts(2, overhead_ns=10**5)):
        for vpp in (1, 2):
            partitions, places, counts, sizes = slime_schedule(slime_here, lengths, vpp=vpp)
            assert sizes == [4, 4]
            assert sorted(chain.from_iterable(partitions)) == [*range(16)]
            for samples, own in zip(partitions, places, strict=True):
                assert len(own) == sum(counts)  # as many on every replica
                assert [*chain.from_iterable(own)] == [*range(len(samples))]
                assert all(sum(lengths[samples[i]] for i in group) <= CAP for group in own)
                first = chain.from_iterable(own[: counts[0]])
                assert {samples[i] for i in first} <= {*range(8)}  # a step's rollouts stay in it
            assert all(count % vpp == 0 for count in counts)


def test_slimes_other_cuts_are_its_own_or_refused(slime_here: Any) -> None:
    with slime.planned_schedules(costs=TokenCosts(2)):
        assert slime_schedule(slime_here, LENGTHS, use_dynamic_batch_size=False) == "theirs"
        with pytest.raises(ConfigError, match="cp_size is 2"):
            slime_schedule(slime_here, LENGTHS, cp=2)
        with pytest.raises(ConfigError, match="4 rollouts are fewer than a step's global_batch_size 5"):
            slime_schedule(slime_here, LENGTHS, size=5)
        with pytest.raises(PlanError, match="sample 2"):
            slime_schedule(slime_here, LENGTHS, max_tokens_per_gpu=80)
    assert slime_schedule(slime_here, LENGTHS) == "theirs"


def test_doctor_says_which_version_of_a_loop_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"verl": "9.9", "torchtitan": TRIED["torchtitan"]}
    monkeypatch.setattr(doctor, "_version", installed.get)
    found = {check.name: check for check in doctor.all_checks()}
    assert (found["verl"].ok, found["verl"].required) == (False, False)
    assert TRIED["verl"] in found["verl"].hint
    assert found["torchtitan"].ok
    assert "megatron-bridge" not in found

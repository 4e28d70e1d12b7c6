"""Universal checkpoints: what engines are given besides tensors, and that tensors come one group at a time."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.tensors import TensorGroup, tensor_groups
from dynapipe_ext.tools.checkpoint.deepspeed.writer import DeepSpeedWriter
from dynapipe_ext.tools.checkpoint.formats import StateKind, TrainingState, WriterOptions

MIXTRAL = Architecture(
    family="mixtral", num_layers=2, hidden_size=8, num_heads=2, num_query_groups=1, head_dim=4, ffn_hidden_size=12,
    vocab_size=11, max_seq_len=16, tied_embeddings=False, num_experts=3, top_k=2,
)  # fmt: skip
TORCH_GROUP = {"lr": 0.1, "weight_decay": 0.3, "betas": (0.9, 0.99), "eps": 1e-8, "foreach": None, "maximize": False}


class Memory:
    """A reader of random tensors that are made when they are asked for."""

    files: tuple[Path, ...] = ()
    architecture = MIXTRAL

    def __init__(self, state: TrainingState | None = None, moments: bool = True) -> None:
        self.state = state
        self.kinds: tuple[StateKind, ...] = ("weight", "master", "exp_avg", "exp_avg_sq") if moments else ("weight",)
        self.asked: list[tuple[str, str]] = []

    def check(self) -> None: ...

    def dtype(self, group: TensorGroup, kind: StateKind) -> torch.dtype:
        return torch.bfloat16 if kind == "weight" else torch.float32

    def read(self, group: TensorGroup, kind: StateKind) -> dict[str, torch.Tensor]:
        self.asked.append((group.name, kind))
        found = {}
        for info in group.tensors:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{info.name} {kind}".encode()))
            found[info.name] = torch.randn(info.shape, generator=generator).to(self.dtype(group, kind))
        return found


def written(folder: Path, reader: Memory) -> Path:
    """The tag that was written."""
    writer = DeepSpeedWriter(folder, reader, WriterOptions())
    records = {piece.name: writer.write(piece, reader.read) for piece in writer.pieces()}
    assert not (folder / "latest").exists()
    writer.finish(records)
    return folder / (folder / "latest").read_text()


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def test_experts_are_one_tensor_as_transformers_has_them(tmp_path: Path) -> None:
    reader = Memory()
    tag = written(tmp_path, reader)
    groups = [g for g in tensor_groups(MIXTRAL) if g.layer == 1 and g.kind == "mlp_in"]
    expected = torch.stack([torch.cat(list(reader.read(group, "exp_avg").values())) for group in groups])
    found = load(tag / "zero" / "model.layers.1.mlp.experts.gate_up_proj" / "exp_avg.pt")["param"]
    assert torch.equal(found, expected)
    assert load(tag / "mp_rank_00_model_states.pt")["module"]["model.layers.1.mlp.experts.down_proj"].shape == (
        3,
        8,
        12,
    )


@pytest.mark.parametrize("moments", [True, False])
def test_each_group_is_asked_for_once_by_each_file_that_holds_it(tmp_path: Path, moments: bool) -> None:
    reader = Memory(moments=moments)
    written(tmp_path, reader)
    names = [group.name for group in tensor_groups(MIXTRAL)]
    assert len({name for name, _ in reader.asked}) == len(names)
    times = {(name, kind): reader.asked.count((name, kind)) for name, kind in reader.asked}
    assert {count for (_, kind), count in times.items() if kind != "weight"} <= {1}
    assert {count for (_, kind), count in times.items() if kind == "weight"} == {1 if moments else 2}


def test_pieces_name_what_they_ask_for(tmp_path: Path) -> None:
    reader = Memory()
    writer = DeepSpeedWriter(tmp_path, reader, WriterOptions())
    for piece in writer.pieces():
        reader.asked.clear()
        writer.write(piece, reader.read)
        assert sorted(set(reader.asked)) == sorted((group.name, kind) for group, kind in piece.groups)
    assert len({piece.name for piece in writer.pieces()}) == len(writer.pieces())


def test_without_moments_an_engine_begins_anew_with_the_weights(tmp_path: Path) -> None:
    tag = written(tmp_path, Memory(moments=False))
    folder = tag / "zero" / "model.norm.weight"
    assert [file.name for file in folder.iterdir()] == ["fp32.pt"]
    assert load(folder / "fp32.pt")["param"].dtype == torch.bfloat16
    optimizer = load(tag / "zero" / "optimizer_state.pt")
    assert optimizer["param_groups"] == [{}] * 64  # else DeepSpeed would pass over an engine's groups
    assert "optimizer_state_dict" not in optimizer


def test_groups_of_an_engine_keep_their_settings_and_stage_3_gets_what_all_agree_on(tmp_path: Path) -> None:
    groups = (TORCH_GROUP, TORCH_GROUP | {"weight_decay": 0.0})
    tag = written(tmp_path, Memory(TrainingState(optimizer_step=5, iteration=9, param_groups=groups)))
    optimizer = load(tag / "zero" / "optimizer_state.pt")
    assert optimizer["param_groups"] == [*groups, *[{}] * 62]
    agreed = {key: value for key, value in TORCH_GROUP.items() if key != "weight_decay"}
    assert optimizer["optimizer_state_dict"]["param_groups"] == [agreed]
    assert torch.equal(optimizer["optimizer_state_dict"]["state"][0]["step"], torch.tensor(5.0))
    assert tag.name == "global_step9"


def test_groups_of_another_framework_give_what_all_agree_on(tmp_path: Path) -> None:
    groups = tuple(
        {**TORCH_GROUP, "weight_decay": wd, "wd_mult": wd / 0.1, "is_expert_parallel": False} for wd in (0, 0.1)
    )
    tag = written(tmp_path, Memory(TrainingState(param_groups=groups)))
    agreed = {key: value for key, value in TORCH_GROUP.items() if key != "weight_decay"}
    assert load(tag / "zero" / "optimizer_state.pt")["param_groups"] == [agreed] * 64


@pytest.mark.parametrize(
    ("group", "step"),
    [(TORCH_GROUP, torch.tensor(5.0)), ({"lr": 0.1, "bias_correction": True}, 5), (None, torch.tensor(5.0))],
)
def test_the_step_is_what_the_optimizer_counts_with(tmp_path: Path, group: Any, step: Any) -> None:
    """torch's Adam counts in a tensor, DeepSpeed's own in a number that its kernels take."""
    groups = (group,) if group else ()
    tag = written(tmp_path, Memory(TrainingState(optimizer_step=5, param_groups=groups)))
    found = load(tag / "zero" / "model.norm.weight" / "step.pt")
    assert type(found) is type(step)
    assert found == step


def test_a_scheduler_of_an_engine_is_carried_and_any_other_starts_at_the_same_step(tmp_path: Path) -> None:
    own = {"last_epoch": 3, "_step_count": 4, "lr_lambdas": [None], "base_lrs": [0.1]}
    tag = written(tmp_path / "own", Memory(TrainingState(scheduler=own)))
    assert load(tag / "mp_rank_00_model_states.pt")["lr_scheduler"] == own
    megatron = {"max_lr": 1.0, "num_steps": 640}
    tag = written(tmp_path / "other", Memory(TrainingState(iteration=20, scheduler=megatron)))
    model = load(tag / "mp_rank_00_model_states.pt")
    assert model["lr_scheduler"] == {"last_epoch": 20, "_step_count": 21, "lr_lambdas": [], "last_batch_iteration": 20}
    scheduler = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.ones(1)], lr=1.0), lambda step: 1 / (step + 1))
    scheduler.load_state_dict(model["lr_scheduler"])
    scheduler.step()
    assert scheduler.get_last_lr() == [1 / 22]
    assert (model["global_steps"], model["skipped_steps"]) == (20, 0)

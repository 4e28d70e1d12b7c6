"""What cannot go with planned schedules in Megatron's loops is refused by its name; Megatron's defaults are not."""

from __future__ import annotations

import copy
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynapipe_ext.batch.topology import Coordinates, Topology
from dynapipe_ext.data.dataset import prepare
from dynapipe_ext.data.examples import generate_examples
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.drop_in.arguments import ScriptSettings
from dynapipe_ext.executor.drop_in.gradient_sync import check_sync
from dynapipe_ext.executor.drop_in.installed import _install_arguments
from dynapipe_ext.executor.drop_in.megatron_lm import check_collects, sent_to_last_rank
from dynapipe_ext.executor.drop_in.pipeline import rank_topology
from dynapipe_ext.executor.drop_in.placement import check_placement
from dynapipe_ext.executor.drop_in.refusals import (
    UNSUPPORTED_ARGUMENTS,
    UNSUPPORTED_BESIDE_DATA,
    UNSUPPORTED_CONFIG,
    UNSUPPORTED_DATA,
    check_arguments,
    check_config,
    check_planned_arguments,
    check_planned_experts,
    dense_layers,
)
from dynapipe_ext.executor.drop_in.settings import DropInSettings
from dynapipe_ext.executor.stages import megatron_cpu

CONFIG: dict[str, Any] = {
    "context_parallel_size": 2,
    "hybrid_context_parallel": True,
    "enable_cuda_graph": True,
    "external_cuda_graph": True,
    "cuda_graph_impl": "transformer_engine",
    "overlap_moe_expert_parallel_comm": True,
    "delay_wgrad_compute": True,
    "defer_embedding_wgrad_compute": True,
    "num_microbatches_with_partial_activation_checkpoints": 1,
    "fine_grained_activation_offloading": True,
    "cpu_offloading": True,
}
LATER_CONFIG: dict[str, Any] = {  # of megatron-core 0.18 and 0.19
    "moe_paged_stash": True,
    "moe_expert_rank_capacity_factor": 1.5,
    "overlap_dispatch_backward_with_experts_wgrad": True,
    "gtp_weight_remat_size": 2,
    "expert_gtp_weight_remat_size": 2,
}
ARGUMENTS: dict[str, Any] = {
    "use_megatron_fsdp": True,
    "use_torch_fsdp2": True,
    "use_tp_pp_dp_mapping": True,
    "num_distributed_optimizer_instances": 2,
    "perform_rl_step": True,
}
DATA: dict[str, Any] = {
    "multiple_validation_sets": True,
    "phase_transition_iterations": [3],
    "iterations_to_skip": [2],
    "decoder_seq_length": 8,
    "dataloader_save": "place",
    "mtp_num_layers": 1,
    "tp_comm_overlap": True,
    "reset_position_ids": True,
    "reset_attention_mask": True,
    "dataloader_inter_document_masking": True,
    "moe_token_dispatcher_type": "flex",
    "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
}
BESIDE_DATA: dict[str, Any] = {
    "mock_data": True,
    "data_path": ["a"],
    "train_data_path": ["a"],
    "valid_data_path": ["a"],
    "test_data_path": ["a"],
    "data_args_path": "a",
    "per_split_data_args_path": "a",
    "eod_mask_loss": True,
    "fim_data": True,
}
CHECKED = ("moe_token_dispatcher_type", "moe_router_load_balancing_type", "multiple_validation_sets")


def test_every_refusal_has_a_case_here() -> None:
    assert {*CONFIG, *LATER_CONFIG} == UNSUPPORTED_CONFIG.keys()
    assert ARGUMENTS.keys() == UNSUPPORTED_ARGUMENTS.keys()
    assert DATA.keys() == {*UNSUPPORTED_DATA, *CHECKED}
    assert BESIDE_DATA.keys() == UNSUPPORTED_BESIDE_DATA.keys()


@pytest.mark.parametrize(
    ("check", "name", "value"),
    [
        *((lambda config: check_config(config, []), *item) for item in (CONFIG | LATER_CONFIG).items()),
        *((check_arguments, *item) for item in (CONFIG | LATER_CONFIG | ARGUMENTS).items()),
        *((partial(check_planned_arguments, from_path=False), *item) for item in DATA.items()),
        *((partial(check_planned_arguments, from_path=True), *item) for item in BESIDE_DATA.items()),
    ],
)
def test_a_setting_is_refused_by_its_name_and_value(check: Callable[[Any], None], name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        check(Namespace(expert_model_parallel_size=2, **{"moe_token_dispatcher_type": "alltoall", name: value}))
    assert re.match(rf"{name} is {re.escape(repr(value))}(,| with) ", str(error.value))


def test_experts_that_are_cut_over_replicas_need_the_alltoall_dispatcher() -> None:
    fine = {"moe_token_dispatcher_type": "allgather", "expert_model_parallel_size": 1, "tensor_model_parallel_size": 2}
    check_planned_experts(Namespace(**fine, expert_tensor_parallel_size=None))
    with pytest.raises(ConfigError, match="allgather' with expert_model_parallel_size 1 and expert_tensor_parallel_si"):
        check_planned_experts(Namespace(**fine, expert_tensor_parallel_size=4))


def test_names_are_those_of_megatrons_configuration_and_its_defaults_pass() -> None:
    megatron_cpu.install()
    from megatron.core.transformer import TransformerConfig

    assert CONFIG.keys() <= {one.name for one in fields(TransformerConfig)}
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    check_config(config, [])


def test_an_encoder_decoder_over_pipeline_ranks_is_refused_with_what_trains_it() -> None:
    check_arguments(Namespace(decoder_seq_length=8, pipeline_model_parallel_size=1))
    with pytest.raises(
        ConfigError, match=r"pipeline_model_parallel_size is 2 with decoder_seq_length 8.*dynapipe train"
    ):
        check_arguments(Namespace(decoder_seq_length=8, pipeline_model_parallel_size=2))


def test_an_order_of_megatrons_own_interleaved_schedule_is_refused() -> None:
    check_arguments(Namespace(microbatch_group_size_per_vp_stage=2, pipeline_model_parallel_size=2))
    with pytest.raises(ConfigError, match="microbatch_group_size_per_vp_stage is 4, which orders"):
        check_arguments(Namespace(microbatch_group_size_per_vp_stage=4, pipeline_model_parallel_size=2))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"pipeline_model_parallel_layout": None}, "pipeline_model_parallel_layout is not given"),
        ({"virtual_pipeline_model_parallel_size": 4}, "has 4 stages a rank: give 2"),
        ({"untie_embeddings_and_output_weights": False}, "give --untie-embeddings-and-output-weights"),
        ({"mtp_num_layers": 1}, "placement is v with mtp_num_layers 1"),
        ({"save": "there", "ckpt_format": "torch"}, "ckpt_format is 'torch' with placement v"),
    ],
)
def test_what_cannot_lie_in_a_v_is_refused(changes: dict[str, Any], told: str) -> None:
    fine = {
        "pipeline_model_parallel_layout": "Et|t|t|tL",
        "virtual_pipeline_model_parallel_size": 2,
        "untie_embeddings_and_output_weights": True,
        "save": "there",
        "ckpt_format": "torch_dist",
    }
    check_placement(Namespace(**fine))
    with pytest.raises(ConfigError, match=told):
        check_placement(Namespace(**fine | changes))


def test_what_does_not_reach_the_last_rank_in_a_v_is_refused() -> None:
    v, linear = Topology(pp=2, placement=(0, 1, 1, 0)), Topology(pp=2)
    check_collects(v, False)
    check_collects(linear, True)
    with pytest.raises(ConfigError, match="collect_non_loss_data is True"):
        check_collects(v, True)
    here = Coordinates(tp_rank=0, pp_rank=0, dp_rank=0)
    with pytest.raises(ConfigError, match="reports 'lm loss' as a tuple"):
        sent_to_last_rank([{"lm loss": (1, 2)}], v, here, torch.device("cpu"))


class FullyShardedFSDP:
    """Stands for Megatron's, by its name."""


def test_chunks_that_cannot_follow_a_plan_are_refused() -> None:
    with pytest.raises(ConfigError, match="the model is a FullyShardedFSDP, sharded by FSDP"):
        check_config(Namespace(), [FullyShardedFSDP()])
    with pytest.raises(ConfigError, match="sharded by FSDP"):
        check_config(Namespace(), [Namespace(ddp_config=Namespace(use_megatron_fsdp=True))])
    with pytest.raises(ConfigError, match="num_distributed_optimizer_instances is 2"):
        check_config(Namespace(), [Namespace(ddp_config=Namespace(num_distributed_optimizer_instances=2))])
    with pytest.raises(ConfigError, match="a Namespace starts its reduction in backwards alone"):
        check_sync([Namespace()], Namespace(no_sync_func=lambda: None, grad_sync_func=None))
    check_sync([Namespace()], Namespace(no_sync_func=None, grad_sync_func=None))


@pytest.mark.parametrize("limit", [0, -1, float("inf"), float("nan")])
def test_a_limit_is_a_number_of_gigabytes(limit: float) -> None:
    with pytest.raises(ConfigError, match="memory_limit_gb is"):
        DropInSettings(memory_limit_gb=limit)
    for name in ("layout", "placement"):
        with pytest.raises(ConfigError, match=f"{name} is 'rows': choose from"):
            DropInSettings(**{name: "rows"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="schedule is '1f1b', but Megatron's arguments decide it: leave it out"):
        DropInSettings(schedule="1f1b")


@dataclass(frozen=True)
class Group:
    """A process group of so many ranks, of which this is one."""

    num_ranks: int
    place: int = 0

    def size(self) -> int:
        return self.num_ranks

    def rank(self) -> int:
        return self.place


@pytest.mark.parametrize(
    ("groups", "chunks", "told"),
    [
        ({"cp": Group(2)}, (1, None), "context_parallel_size is 2"),
        ({}, (2, None), "2 model chunks were given where Megatron's state or vp_size says 1"),
        ({}, (1, 2), "1 model chunks were given where Megatron's state or vp_size says 2"),
        ({"dp_cp": Group(2, 1), "pp": Group(2, 0)}, (1, None), "rank 2 of 4 is .* not Megatron's default"),
        ({"dp_cp": Group(1)}, (1, None), "not Megatron's default order of ranks"),
    ],
)
def test_ranks_that_lie_otherwise_are_refused(
    monkeypatch: pytest.MonkeyPatch, groups: dict[str, Group], chunks: tuple[int, int | None], told: str
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    found = {"tp": Group(1), "pp": Group(2, 1), "cp": Group(1), "dp_cp": Group(2, 0)}
    assert rank_topology(Namespace(**found), 1)[0].dp == 2
    with pytest.raises(ConfigError, match="placement is v but each rank holds 1 of the model's stages: give two"):
        rank_topology(Namespace(**found), 1, "v")
    with pytest.raises(ConfigError, match=told):
        rank_topology(Namespace(**found | groups), chunks[0], vp_size=chunks[1])


@pytest.mark.parametrize(
    ("frequency", "dense"),
    [
        (1, ()), ([0, 1, 1, 1], (0,)), ([0, 0, 0, 1], (0, 1, 2)), ([1, 1, 1, 1], ()), (2, (1, 3)), (3, (1, 2)),
        ([1, 0, 1, 1], (1,)), ([0] * 4, (0, 1, 2, 3)),
    ],
)  # fmt: skip
def test_layers_without_experts_are_those_that_megatron_builds(frequency: Any, dense: tuple[int, ...]) -> None:
    assert dense_layers(Namespace(num_layers=4, num_experts=8, moe_layer_freq=frequency)) == dense
    assert dense_layers(Namespace(num_layers=4, num_moe_experts=None, moe_layer_freq=frequency)) == ()


def test_arguments_that_planned_data_cannot_go_with_are_refused_as_they_are_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Megatron-LM builds its model: parts that fill no global batch."""
    prepare(
        lambda: generate_examples(num_samples=400, seed=0),
        tmp_path / "data",
        tokenizer="bytes",
        max_seq_len=4096,
        truncate=True,
    )
    parsed = Namespace(
        **{"num_layers": 4, "moe_layer_freq": 1, "sft": False, "split": None, "global_batch_size": 32},
        **{"seq_length": 4096, "skip_train": False, "eval_iters": 10, "pipeline_model_parallel_size": 1},
    )

    def parse_args(*_: Any) -> Namespace:
        return copy.copy(parsed)

    module = ModuleType("megatron.training.arguments")
    module.parse_args = parse_args  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.training.initialize", ModuleType("megatron.training.initialize"))
    monkeypatch.setitem(sys.modules, "megatron.training.arguments", module)

    def refused(**changes: Any) -> str:
        with ExitStack() as patches:
            _install_arguments(patches, ScriptSettings(data=tmp_path / "data"))
            vars(parsed).update(changes)
            try:
                module.parse_args()  # type: ignore[attr-defined]
            except ConfigError as error:
                return str(error)
        return ""

    assert refused() == ""
    assert refused(split="949,50,1") == ""  # 20 samples for a global batch of 32, which repeat
    assert refused(split="899,100,1") == ""  # no sample is left for tests, which are left out
    assert "leaves the training data 4 of 400 samples" in refused(split="1,99,0")
    assert refused(split="949,50,1", eval_iters=0) == ""
    assert refused(split="90,10,0", eval_iters=10) == ""
    assert refused(num_experts=4, moe_layer_freq=2) == ""

"""Models of published families that train on Megatron's ranks, save and load as Megatron does.

Gradients are drawn by name and step, so a model that is trained on any topology has the same weights and moments: what
one process holds is the truth for all. Import this at the top of a test module.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.executor.stages.megatron.model import (
    build_model,
    full_shape,
    initialize_parallel,
    tensor_slice,
    transformer_config,
)
from dynapipe_ext.executor.stages.megatron.stage import wrap_ddp
from dynapipe_ext.launch.processes.env import RankEnv
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.huggingface import read_config
from dynapipe_ext.models.written_arguments import write_arguments
from dynapipe_ext.tools.checkpoint.megatron.names import tied_head_name
from tests.support.checkpoints import tiny_variant
from tests.support.megatron_ranks import CPU, join, whole_name
from tests.support.megatron_saves import keep_results_in_rank
from tests.support.rank_jobs import in_turn

keep_results_in_rank()

STEPS, SAMPLES, ITERATION = 2, 24, 10
ONE = Topology()
Local = dict[str, dict[str, torch.Tensor]]  # kind -> name -> what a rank holds


@dataclass(frozen=True)
class Case:
    variant: str
    topology: Topology = ONE
    dtype: str = "bfloat16"
    distributed: bool = False
    metadata: tuple[tuple[str, Any], ...] = ()
    ep: int = 1  # replicas that share the experts

    def __str__(self) -> str:
        t = self.topology
        words = [self.variant, f"tp{t.tp}pp{t.pp}dp{t.dp}", self.dtype] + ["zero1"] * self.distributed
        words += [f"ep{self.ep}"] * (self.ep > 1)
        return "-".join([*words, *(name for name, _ in self.metadata)])

    @property
    def has_legacy(self) -> bool:
        """Whether its legacy files hold all of it on one rank of each kind."""
        return not self.distributed and self.ep == 1

    @property
    def architecture(self) -> Architecture:
        return _architecture(self.variant, self.dtype)


@cache
def _architecture(variant: str, dtype: str) -> Architecture:
    return read_config(tiny_variant(variant).config.to_dict() | {"torch_dtype": dtype, "dtype": dtype})


class Training:
    """A rank's model and optimizer; weights are NaN until they are drawn or loaded."""

    def __init__(self, case: Case, architecture: Architecture, rank: int) -> None:
        self.case, self.architecture = case, architecture
        initialize_parallel(case.topology, 0)
        if case.ep > 1:
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(
                case.topology.tp, case.topology.pp, expert_model_parallel_size=case.ep
            )
        self.me = case.topology.coordinates(rank)
        self.config = transformer_config(self.architecture, case.topology, dtype=case.dtype)
        self.config.expert_model_parallel_size = case.ep
        padded = self.architecture.padded(case.topology.tp)  # as Megatron-LM itself pads
        self.model = build_model(padded, case.topology, self.me.pp_rank, self.config, seed=None, device=CPU)
        layers = case.topology.with_layers(self.architecture.num_layers).layers_per_stage
        self.first_layer = sum(layers[: self.me.pp_rank])
        self.ddp = wrap_ddp(self.model, self.config, distributed_optimizer=case.distributed)

    def start(self) -> None:
        """Draw the weights, then build the optimizer, which copies them."""
        with torch.no_grad():
            for name, parameter in self.named():
                parameter.copy_(self.drawn(name, parameter, 0, 0.1))
        self.build_optimizer()

    def build_optimizer(self) -> None:
        settings = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            min_lr=1e-3,
            weight_decay=0.1,
            clip_grad=0.0,
            bf16=self.config.bf16,
            params_dtype=self.config.params_dtype,
            use_distributed_optimizer=self.case.distributed,
        )
        self.optimizer = get_megatron_optimizer(settings, [self.ddp])
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=1e-2,
            min_lr=1e-3,
            lr_warmup_steps=8,
            lr_decay_steps=400,
            lr_decay_style="cosine",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=400,
            wd_incr_style="constant",
        )

    def forget(self) -> None:
        """As before the start, but for an optimizer, which holds nothing yet."""
        with torch.no_grad():
            for _, parameter in self.named():
                parameter.fill_(torch.nan)
        self.build_optimizer()

    def named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, parameter in self.model.named_parameters():
            yield whole_name(self.architecture, name, self.first_layer), parameter

    def trained(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((name, parameter) for name, parameter in self.named() if parameter.requires_grad)

    def drawn(self, name: str, parameter: torch.Tensor, step: int, scale: float) -> torch.Tensor:
        """This rank's part of a random tensor that depends on name and step alone; rows of padding are zero."""
        if self.architecture.tied_embeddings and name == tied_head_name(self.architecture):
            name = "embedding.word_embeddings.weight"
        shape = full_shape(parameter, self.case.topology.tp)
        is_vocabulary = name.endswith(("word_embeddings.weight", "output_layer.weight"))
        rows = self.architecture.vocab_size if is_vocabulary else shape[0]
        if name.endswith("lm_head.output_layer.bias"):
            return torch.zeros_like(parameter)  # Megatron's own: published models have none
        key = int.from_bytes(hashlib.sha256(f"{name}/{step}".encode()).digest()[:7], "little")
        whole = torch.randn((rows, *shape[1:]), generator=torch.Generator().manual_seed(key)) * scale
        whole = torch.cat([whole, whole.new_zeros((shape[0] - rows, *shape[1:]))])
        return tensor_slice(whole, parameter, self.me.tp_rank, self.case.topology.tp)

    def step(self, step: int) -> None:
        for name, parameter in self.trained():
            parameter.main_grad.copy_(self.drawn(name, parameter, step, 1.0))
        self.scheduler.step(SAMPLES // STEPS)
        assert self.optimizer.step()[0]

    def held(self) -> Local:
        """What this rank holds of weights, and of the optimizer where it is not spread over replicas."""
        found: Local = {"weight": {name: p.detach().clone() for name, p in self.named()}}
        if self.case.distributed:
            return found
        for name, parameter in self.trained():
            main = getattr(parameter, "main_param", None)
            chained = int(not getattr(parameter, "allreduce", True))  # experts have an optimizer of their own
            state = self.optimizer.state[(chained, main if main is not None else parameter)]
            tensors = {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
            if main is not None:
                tensors["master"] = main
            for kind, tensor in tensors.items():
                found.setdefault(kind, {})[name] = tensor.detach().clone()
        return found

    def sharded(self, *, is_loading: bool) -> dict[str, Any]:
        metadata = {
            **dict(self.case.metadata),
            "distrib_optim_sharding_type": "fully_reshardable",
            "chained_optim_avoid_prefix": True,
        }
        model = self.model.sharded_state_dict(metadata=metadata)
        return {"model": model, "optimizer": self.optimizer.sharded_state_dict(model, is_loading, metadata=metadata)}

    def common(self) -> dict[str, Any]:
        topology = self.case.topology
        known = write_arguments(self.architecture) | {
            "tensor_model_parallel_size": topology.tp,
            "pipeline_model_parallel_size": topology.pp,
            "expert_model_parallel_size": self.case.ep,
            "consumed_train_samples": SAMPLES,
        }
        return {
            "args": argparse.Namespace(**known),
            "checkpoint_version": 3.0,
            "iteration": ITERATION,
            "opt_param_scheduler": self.scheduler.state_dict(),
            "num_floating_point_operations_so_far": 12.5,
        }

    def save_dist(self, root: Path) -> None:
        folder = root / f"iter_{ITERATION:07d}"
        folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dist_checkpointing.save({**self.common(), **self.sharded(is_loading=False)}, str(folder))
        (root / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))

    def save_legacy(self, root: Path) -> None:
        name = f"mp_rank_{self.me.tp_rank:02d}" + (f"_{self.me.pp_rank:03d}" if self.case.topology.pp > 1 else "")
        folder = root / f"iter_{ITERATION:07d}" / name
        if self.me.dp_rank == 0:
            folder.mkdir(parents=True)
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save({**self.common(), **state}, folder / "model_optim_rng.pt")

    def load_dist(self, root: Path) -> None:
        (folder,) = (entry for entry in root.iterdir() if entry.name.startswith("iter_"))
        if self.case.distributed:  # with torch's Adam it cannot say what it wants to load before it holds something
            for optimizer in self.optimizer.chained_optimizers:
                optimizer._init_optimizer_states_with_dummy_values()
                keeping_step(optimizer)
        loaded = dist_checkpointing.load(self.sharded(is_loading=True), str(folder))
        self.model.load_state_dict(loaded["model"], strict=True)
        with torch.no_grad():
            self.optimizer.load_state_dict(loaded["optimizer"])
        self.scheduler.load_state_dict(loaded["opt_param_scheduler"])

    def load_legacy(self, root: Path) -> None:
        name = f"mp_rank_{self.me.tp_rank:02d}" + (f"_{self.me.pp_rank:03d}" if self.case.topology.pp > 1 else "")
        (folder,) = (entry for entry in root.iterdir() if entry.name.startswith("iter_"))
        loaded = torch.load(folder / name / "model_optim_rng.pt", weights_only=False)
        self.model.load_state_dict(loaded["model"], strict=True)
        self.optimizer.load_state_dict(loaded["optimizer"])
        self.scheduler.load_state_dict(loaded["opt_param_scheduler"])


def keeping_step(optimizer: Any) -> None:
    """megatron-core 0.16 with torch's Adam looks for the step, which it took from the groups, among a weight's tensors,
    and gives all weights one step tensor, which then counts once for each: they get one each, as after training.
    """
    put = optimizer._set_main_param_and_optimizer_states

    def put_but_step(parameter: Any, tensors: dict[str, torch.Tensor]) -> None:
        group, place = optimizer.model_param_group_index_map[parameter]
        state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][place]]
        state["step"] = state["step"].clone()
        put(parameter, tensors | {"step": state["step"].clone()})

    optimizer._set_main_param_and_optimizer_states = put_but_step


Job = tuple[Case, Callable[[Training], Any]]


def on_ranks(jobs: Sequence[Job]) -> list[list[Any]]:
    """For each job what its function gives on every rank of its case; jobs of as many ranks share their processes."""

    def main(env: RankEnv, case: Case, architecture: Architecture, run: Callable[[Training], Any]) -> Any:
        join(env)
        found = run(Training(case, architecture, env.rank))
        dist.barrier()
        dist.destroy_process_group()
        return found

    named = {
        (number, str(case)): (
            case.topology.world_size,
            partial(main, case=case, architecture=case.architecture, run=run),
        )
        for number, (case, run) in enumerate(jobs)
    }
    return list(dict(sorted(in_turn(named).items())).values())


def saving(folder: Path | None) -> Callable[[Training], Local]:
    """Train and give what the rank holds; checkpoints in both layouts go to `folder`, if there is one."""

    def run(training: Training) -> Local:
        training.start()
        for step in range(1, STEPS + 1):
            training.step(step)
        if folder is not None:
            training.save_dist(folder / "dist")
            if training.case.has_legacy:
                training.save_legacy(folder / "legacy")
        return training.held()

    return run

"""What a Megatron checkpoint keeps besides tensors: arguments, the optimizer's groups and step, the schedule."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.megatron_arguments import num_added_tokens
from dynapipe_ext.models.tensors import tensor_groups
from dynapipe_ext.models.written_arguments import write_arguments
from dynapipe_ext.tools.checkpoint.formats import (
    CheckpointReader,
    MegatronValues,
    StateKind,
    TrainingState,
    WriterOptions,
)
from dynapipe_ext.tools.checkpoint.megatron.launch_options import pipeline_layout, usage_notices
from dynapipe_ext.tools.checkpoint.megatron.legacy_names import has_decay
from dynapipe_ext.tools.checkpoint.megatron.names import megatron_tensors
from dynapipe_ext.tools.checkpoint.megatron.pickles import is_plain, plain, scalar
from dynapipe_ext.tools.checkpoint.megatron.shards import RankLayout

MOMENTS: tuple[StateKind, ...] = ("exp_avg", "exp_avg_sq")
RNG_NOTICE = (
    "random number states are not carried: they belong to the ranks of the source; start Megatron with --no-load-rng"
)
_KNOWN = {
    "args", "checkpoint_version", "iteration", "model", "optimizer", "opt_param_scheduler", "lr_scheduler", "rng_state",
    "content_metadata", "num_floating_point_operations_so_far", "rerun_state_machine", "tokens",
}  # fmt: skip
_PROGRESS = ("num_floating_point_operations_so_far", "tokens")
_GROUP = {
    "wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "lr": 1e-4, "max_lr": None,
    "min_lr": None, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "bias_correction": True, "amsgrad": False,
    "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
    "decoupled_weight_decay": True,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MegatronContents:
    """A checkpoint but for its tensors."""

    megatron: MegatronValues
    state: TrainingState | None
    notices: tuple[str, ...]

    @property
    def told(self) -> Mapping[str, Any]:
        """The arguments, those with other values too: one that makes another model must not be passed over."""
        return {**self.megatron.arguments, **dict.fromkeys(self.megatron.dropped_arguments, "no plain value")}


def read_contents(common: Mapping[str, Any]) -> MegatronContents:
    """From the top level of common.pt, or of a rank's model_optim_rng.pt."""
    arguments = vars(common["args"]) if isinstance(common.get("args"), argparse.Namespace) else {}
    plain_arguments = {name: plain(value) for name, value in arguments.items() if is_plain(value)}
    dropped = tuple(sorted(str(name) for name in arguments.keys() - plain_arguments.keys()))
    notices = []
    if others := sorted(name for name in common if name not in _KNOWN and not re.fullmatch(r"model\d*", str(name))):
        notices.append(f"the checkpoint also holds {', '.join(map(str, others))}, which are not carried")
    optimizer = _inner(common.get("optimizer"))
    groups = tuple(
        {name: plain(value) for name, value in group.items() if name not in ("params", "step") and is_plain(value)}
        for group in _groups(optimizer)
    )
    state = None
    if optimizer or common.get("opt_param_scheduler") or int(scalar(common.get("iteration"))) > 0:
        schedule = common.get("opt_param_scheduler") or common.get("lr_scheduler")
        state = TrainingState(
            iteration=int(scalar(common.get("iteration"))),
            optimizer_step=_step(optimizer),
            consumed_samples=int(scalar(plain_arguments.get("consumed_train_samples"))),
            param_groups=groups,
            scheduler=plain(schedule) if isinstance(schedule, Mapping) else {},
        )
    progress = {name: plain(common[name]) for name in _PROGRESS if name in common and is_plain(common[name])}
    scalers = [one.get("grad_scaler") for one in _chained_optimizers(common.get("optimizer"))]
    loss_scale: dict[str, Any] = next((plain(scaler) for scaler in scalers if isinstance(scaler, Mapping)), {})
    values = MegatronValues(
        arguments=plain_arguments, dropped_arguments=dropped, progress=progress, grad_scaler=loss_scale
    )
    return MegatronContents(values, state, tuple(notices))


def _chained_optimizers(optimizer: Any) -> list[Mapping[str, Any]]:
    """Return the dictionaries of Megatron's chained optimizers, that of the dense weights first; a single one's own."""
    if isinstance(optimizer, list | tuple):
        optimizer = dict(enumerate(optimizer))
    if not isinstance(optimizer, Mapping):
        return []
    numbers = sorted(key for key in optimizer if isinstance(key, int))
    chained = [optimizer[number] for number in numbers] if numbers else [optimizer]
    return [one for one in chained if isinstance(one, Mapping)]


def _inner(optimizer: Any) -> Mapping[str, Any]:
    """Return torch's dictionary inside Megatron's; of several chained ones, the first with the groups of all."""
    chained = [
        inside if isinstance(inside := one.get("optimizer"), Mapping) else one for one in _chained_optimizers(optimizer)
    ]
    if not chained:
        return {}
    return {**chained[0], "param_groups": [group for one in chained for group in _groups(one)]}


def _groups(optimizer: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    groups = optimizer.get("param_groups")
    yield from (group for group in (groups if isinstance(groups, list) else []) if isinstance(group, Mapping))


def _step(optimizer: Mapping[str, Any]) -> int:
    """Of the first place that says it: a common step, a group's, a parameter's."""
    states = optimizer.get("state")
    steps = [states.get("common_step")] if isinstance(states, Mapping) else []
    steps += [group.get("step") for group in _groups(optimizer)]
    steps += (
        [one.get("step") for one in states.values() if isinstance(one, Mapping)] if isinstance(states, Mapping) else []
    )
    return next((int(scalar(step)) for step in steps if step is not None), 0)


def written_kinds(reader: CheckpointReader) -> tuple[StateKind, ...]:
    """Weights, and the optimizer's tensors where all that Megatron needs are there: fp32 weights have no copies."""
    if reader.state is None or not set(MOMENTS) <= set(reader.kinds):
        return ("weight",)
    dtypes = {reader.dtype(group, "weight") for group in tensor_groups(reader.architecture)}
    if dtypes == {torch.float32}:
        return ("weight", *MOMENTS)
    return ("weight", "master", *MOMENTS) if "master" in reader.kinds else ("weight",)


def writer_notices(reader: CheckpointReader, layout: RankLayout, state: TrainingState | None) -> tuple[str, ...]:
    """What a Megatron checkpoint made of another does not have, or cannot say."""
    notices = usage_notices(layout.architecture, layout.padded_vocab_size)
    notices += (RNG_NOTICE,) if state is not None else ()
    if dropped := reader.megatron.dropped_arguments:
        notices += (f"arguments whose values are no plain ones are not carried: {', '.join(dropped)}",)
    return notices


def param_groups(state: TrainingState) -> list[dict[str, Any]]:
    """Return Megatron's groups of parameters, those of expert parallel ranks joined with the others, as on one such
    rank.

    Groups of other libraries lend their settings to Megatron's two: with weight decay, and without.
    """
    groups = [dict(group) for group in state.param_groups]
    if not groups or not all("wd_mult" in group or "pre_wd_mult" in group for group in groups):
        decayed = {**_GROUP, **{key: value for key, value in (groups[0] if groups else {}).items() if key in _GROUP}}
        return [decayed, {**decayed, "wd_mult": 0.0, "weight_decay": 0.0}]
    by_settings: dict[tuple[Any, ...], dict[str, Any]] = {}
    for group in sorted(groups, key=lambda group: bool(group.get("is_expert_parallel"))):
        by_settings.setdefault(_settings(group), _completed(group, is_expert_parallel=False))
    return list(by_settings.values())


def chained_param_groups(state: TrainingState, architecture: Architecture) -> list[list[dict[str, Any]]]:
    """Return the groups of the two optimizers that Megatron chains above one expert parallel rank: of the dense
    weights and of the experts'.

    A source without expert parallelism lends the experts its own groups, that of undecayed weights only to experts
    with biases.
    """
    groups = [dict(group) for group in state.param_groups]
    of_experts = [group for group in groups if group.get("is_expert_parallel")]
    dense = param_groups(replace(state, param_groups=tuple(g for g in groups if not g.get("is_expert_parallel"))))
    if not of_experts:
        tensors = [t for group in tensor_groups(architecture) for t in megatron_tensors(architecture, group)]
        kinds = {has_decay(tensor.name, tensor.shape) for tensor in tensors if tensor.is_of_experts}
        of_experts = [
            group
            for group in dense
            if decays(group) in kinds and group.get("default_config", True) and not group.get("is_decoupled_lr")
        ]
    return [dense, [_completed(group, is_expert_parallel=True) for group in of_experts]]


def _settings(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells groups of parameters apart, whether or not their weights are experts'."""
    completed = _completed(group, is_expert_parallel=False)
    own = (completed.get(name, completed.get(f"pre_{name}")) for name in ("wd_mult", "lr_mult", "is_decoupled_lr"))
    return (*own, completed.get("max_lr"), completed.get("min_lr"))


def _completed(group: Mapping[str, Any], *, is_expert_parallel: bool) -> dict[str, Any]:
    """Return a group with the settings that older versions of Megatron do not write."""
    lacking = {key: _GROUP[key] for key in ("is_decoupled_lr", "lr_mult")}
    return {**lacking, **group, "is_expert_parallel": is_expert_parallel}


def decays(group: Mapping[str, Any]) -> bool:
    """Whether a group of Megatron's has weight decay."""
    return float(group.get("wd_mult", group.get("pre_wd_mult", 1.0))) != 0


def arguments_of(reader: CheckpointReader, layout: RankLayout, options: WriterOptions, *, is_training: bool) -> Any:
    """Megatron's argument namespace: the source's where it has one, the model's, and the new layout."""
    arguments = dict(reader.megatron.arguments)
    arguments.setdefault("add_position_embedding", True)
    # Megatron-LM compares the type where a vocabulary's file is given: GPT-2's alone.
    if arguments.get("tokenizer_type") is None:
        arguments["tokenizer_type"] = "GPT2BPETokenizer" if layout.architecture.family == "gpt2" else None
    described = write_arguments(layout.architecture)
    arguments |= {
        **described,
        "vocab_size": layout.architecture.vocab_size - num_added_tokens(arguments),
        "make_vocab_size_divisible_by": options.vocab_divisible_by,
        "padded_vocab_size": layout.padded_vocab_size,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "num_layers_per_virtual_pipeline_stage": layout.layers_per_virtual_stage,
        "expert_model_parallel_size": layout.ep,
        "no_save_rng": True,
        "no_save_optim": not is_training,
        "iteration": reader.state.iteration if reader.state and is_training else 0,
        "consumed_train_samples": reader.state.consumed_samples if reader.state and is_training else 0,
    }
    arguments["pipeline_model_parallel_layout"] = pipeline_layout(layout)
    return argparse.Namespace(**arguments)


def grad_scaler(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A loss scaler's dictionary as Megatron loads it: the scale is a tensor of one value."""
    return {name: torch.tensor([float(value)]) if name == "scale" else value for name, value in saved.items()}

"""What a training of Megatron-LM came to on its ranks, unrounded, and how far two of them are apart."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]  # of a rank: its steps, and its part of the weights at the end


@dataclass(frozen=True, slots=True)
class Apart:
    """Largest relative differences: of the steps' losses and gradient norms, and of a weight's at the end (2-norms)."""

    loss: float
    grad_norm: float
    weights: float


class Recorder:
    """Installed once, before ranks are forked: each then keeps its own."""

    def __init__(self, training: Any) -> None:
        """`training` is Megatron-LM's module of that name. Weights are made to depend on their names, not on ranks: a
        run on few ranks is then the measure of runs on any."""
        self._chunks: list[Any] = []
        self._tp_rank = self._ep_rank = self._num_experts = 0
        self._ep = 1
        self._steps: list[dict[str, Any]] = []
        self._tflops_per_s: list[float] = []
        get_model, train_step = training.get_model, training.train_step
        track = training.one_logger_utils.track_e2e_metrics

        def recorded_model(build: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
            from megatron.core import parallel_state

            from dynapipe_ext.executor.stages.megatron.model import initialize_weights
            from dynapipe_ext.executor.stages.megatron.stage import unwrapped

            chunks = build(*arguments, **keywords)
            for model in map(unwrapped, chunks):
                initialize_weights(model, model.config, seed=1)
            self._chunks, self._tp_rank = chunks, parallel_state.get_tensor_model_parallel_rank()
            self._ep_rank = parallel_state.get_expert_model_parallel_rank()
            self._ep = parallel_state.get_expert_model_parallel_world_size()
            self._num_experts = unwrapped(chunks[0]).config.num_moe_experts or 0
            return chunks

        def recorded_step(*arguments: Any, **keywords: Any) -> Any:
            started_s, started_cpu_s = time.monotonic(), time.process_time()
            found = train_step(*arguments, **keywords)
            losses, skipped, grad_norm = found[0], found[1], found[5]
            self._steps.append(
                {
                    "losses": {name: float(value) for name, value in losses.items()},
                    "skipped": bool(skipped),
                    "grad_norm": grad_norm,
                    "step_s": time.monotonic() - started_s,
                    "cpu_s": time.process_time() - started_cpu_s,
                }
            )
            return found

        def recorded_throughput(*log_and_throughput: Any) -> Any:
            self._tflops_per_s.extend(log_and_throughput[1:])  # of a rank; the log has one decimal
            return track(*log_and_throughput)

        training.one_logger_utils.track_e2e_metrics = recorded_throughput
        training.get_model, training.train_step = partial(recorded_model, get_model), recorded_step
        models: Any = sys.modules.get("megatron.training.models.gpt")
        if models is not None:  # from 0.19 on
            build = models.GPTModelBuilder.build_distributed_models
            models.GPTModelBuilder.build_distributed_models = lambda *own, **keywords: recorded_model(
                build, *own, **keywords
            )

    def save(self, place: Path) -> None:
        import torch

        from dynapipe_ext.executor.stages.megatron.model import global_expert_name, held_weights
        from dynapipe_ext.executor.stages.megatron.stage import unwrapped

        weights = {}
        for name, parameter in (pair for chunk in self._chunks for pair in held_weights(unwrapped(chunk))):
            cut = (parameter.partition_dim, parameter.partition_stride) if _is_cut(parameter) else None  # type: ignore[attr-defined]
            name = global_expert_name(name, self._num_experts, self._ep_rank, self._ep)
            weights[name] = (parameter.detach().clone(), cut)
        steps = {"steps": self._steps, "tflops_per_s": self._tflops_per_s}
        torch.save({**steps, "tp_rank": self._tp_rank, "weights": weights}, place)


def apart(ours: Iterable[Record], theirs: Iterable[Record]) -> Apart:
    """Of all ranks of two runs, on any ranks, whose steps must be the same, skipped ones too; of one run, a replica's
    weights must have the bits of another's."""
    ours, theirs = list(ours), list(theirs)
    here, there = whole_weights(ours), whole_weights(theirs)
    assert here.keys() == there.keys(), here.keys() ^ there.keys()
    skipped = [[step["skipped"] for step in ranks[0]["steps"]] for ranks in (ours, theirs)]
    assert skipped[0] == skipped[1]
    return Apart(
        loss=max(map(_relative, losses(ours), losses(theirs))),
        grad_norm=max(map(_relative, grad_norms(ours), grad_norms(theirs)), default=0.0),
        weights=max(float((here[name] - value).norm() / value.norm()) for name, value in there.items()),
    )


def losses(ranks: Iterable[Record]) -> list[float]:
    """Of each step, as the last stage has them."""
    reported = next(rank["steps"] for rank in ranks if rank["steps"][0]["losses"])
    return [next(iter(step["losses"].values())) for step in reported]


def grad_norms(ranks: Iterable[Record]) -> list[float]:
    """Of each step that was not skipped."""
    return [step["grad_norm"] for step in next(iter(ranks))["steps"] if not step["skipped"]]


def whole_weights(ranks: Iterable[Record]) -> dict[str, Any]:
    """Every weight by its name in the whole model, its tensor parallel parts put together."""
    import torch

    parts: dict[str, dict[int, Any]] = {}
    cuts: dict[str, tuple[int, int] | None] = {}
    for rank in ranks:
        for name, (part, cut) in rank["weights"].items():
            found = parts.setdefault(name, {}).setdefault(rank["tp_rank"] if cut else 0, part)
            assert torch.equal(found, part), f"copies of {name} differ"
            cuts[name] = cut
    return {name: _joined([found[i] for i in sorted(found)], cuts[name]) for name, found in parts.items()}


def _joined(parts: list[Any], cut: tuple[int, int] | None) -> Any:
    import torch

    if cut is None:
        return parts[0]
    dim, stride = cut
    return torch.cat([part.chunk(stride, dim)[i] for i in range(stride) for part in parts], dim)


def _is_cut(parameter: Any) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def _relative(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / abs(theirs)

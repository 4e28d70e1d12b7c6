"""Stages of torch.distributed.pipelining's kind, stepped by `PlannedSchedule`: one process's losses and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.loops import torchtitan
from dynapipe_ext.executor.loops.torchtitan import PlannedSchedule

VOCAB, HIDDEN = 64, 16
SHAPES = [(2, 13), (1, 5), (3, 8), (1, 16), (2, 7)]


class Part(torch.nn.Module):
    """As torchtitan's parts: what lies on other stages is None."""

    def __init__(self, whole: torch.nn.ModuleDict, held: list[str]) -> None:
        super().__init__()
        self.held = torch.nn.ModuleDict({name: whole[name] for name in held})

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        for module in self.held.values():
            x = module(x)
        assert positions is not None
        return x * (1 + positions.unsqueeze(-1) / 100).to(x.dtype)


@dataclass(frozen=True)
class Kind:
    """Of a model: what does not train, with gradients of ones left from before; whether two layers are one."""

    dtype: torch.dtype = torch.float32
    frozen: tuple[str, ...] = ()
    tied: bool = False


def parts(num_stages: int, kind: Kind) -> list[Part]:
    torch.manual_seed(0)
    whole = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(VOCAB, HIDDEN)})
    whole.update({f"layer{i}": torch.nn.Linear(HIDDEN, HIDDEN) for i in range(4)})
    whole["head"] = torch.nn.Linear(HIDDEN, VOCAB)
    whole.to(kind.dtype)
    if kind.tied:
        whole["layer3"] = whole["layer0"]
    for frozen in [p for name in kind.frozen for p in whole[name].requires_grad_(False).parameters()]:
        frozen.grad = torch.ones_like(frozen)
    names = ["embedding", *(f"layer{i}" for i in range(4)), "head"]
    cuts = [round(i * len(names) / num_stages) for i in range(num_stages + 1)]
    return [Part(whole, names[first:end]) for first, end in pairwise(cuts)]


def micro_batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for rows, length in SHAPES:
        tokens = torch.randint(0, VOCAB, (rows, length + 1), generator=generator)
        positions = torch.arange(length).expand(rows, length)
        found.append({"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "positions": positions})
    return found


def loss_of(output: torch.Tensor, target: torch.Tensor, *, divisor: int) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum") / divisor


def one_process(num_stages: int, kind: Kind) -> tuple[list[float], dict[str, torch.Tensor]]:
    chain, losses = parts(num_stages, kind), []
    for one in micro_batches():
        x = one["tokens"]
        for part in chain:
            x = part(x, positions=one["positions"])
        loss = loss_of(x, one["labels"], divisor=99)
        loss.backward()
        losses.append(float(loss.detach()))
    return losses, {f"{s}.{n}": p.grad for s, part in enumerate(chain) for n, p in part.named_parameters()}  # type: ignore[misc]


def stepped(env: Any, placement: tuple[int, ...], split: bool, kind: Kind = Kind(), dp: int = 1) -> bool:
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=env.rank, world_size=env.world_size, init_method=env.init_method)
    chain, where = parts(len(placement), kind), dict(enumerate(placement))
    pp_rank, dp_rank = divmod(env.rank, dp)
    own = [stage for stage, rank in where.items() if rank == pp_rank]
    stages = [SimpleNamespace(submod=chain[s], stage_index=s, stage_index_to_group_rank=where) for s in own]
    schedule = PlannedSchedule(stages, loss_of, hidden_size=HIDDEN, split_backward=split)
    weights, put_off = [p for s in own for p in chain[s].parameters()], set[bool]()
    if split:
        schedule._stage.backward_weight = partial(  # type: ignore[method-assign]
            whether_changed, schedule._stage.backward_weight, weights, put_off
        )
    batches, losses = micro_batches()[dp_rank::dp], [] if len(placement) - 1 in own else None
    keywords = {
        "arg_mbs": [(one["tokens"],) for one in batches] if 0 in own else None,
        "target_mbs": [one["labels"] for one in batches] if losses is not None else None,
        "loss_kwargs": {"divisor": 99},
        "losses": losses,
    }
    for _ in range(2):  # gradients add up
        schedule.step(kwarg_mbs=[{"positions": one["positions"]} for one in batches], **keywords)
    expected_losses, gradients = one_process(len(placement), kind)
    rel, least = {torch.float64: (1e-13, 1e-15), torch.float32: (1e-5, 1e-6), torch.bfloat16: (0.03, 0.01)}[kind.dtype]
    same = all(
        torch.allclose(parameter.grad, (1 + parameter.requires_grad) * gradients[f"{s}.{name}"], rtol=rel, atol=least)
        for s in own
        for name, parameter in chain[s].named_parameters()
    )
    same &= put_off == ({True} if split else set())  # W gives the gradients of weights
    with pytest.raises(ConfigError, match="no outputs are kept"):
        schedule.step(return_outputs=True)
    if losses is not None:
        same &= torch.allclose(torch.stack(losses), torch.tensor(expected_losses[dp_rank::dp]), rtol=max(rel, 1e-6))
    return same


def whether_changed(call: Any, weights: list[torch.nn.Parameter], changed: set[bool], stage: int, number: int) -> None:
    """Run W, and keep whether it changed a gradient."""
    before = [None if p.grad is None else p.grad.clone() for p in weights]
    call(stage, number)
    now = [p.grad for p in weights]
    changed.add(any(b is not None and (a is None or not torch.equal(a, b)) for a, b in zip(before, now, strict=True)))


def steps(env: Any) -> list[bool]:
    found = [stepped(env, *case) for case in (((0, 1), False), ((0, 1), True), ((0, 1, 0, 1), False))]
    found += [
        stepped(env, (0, 1, 1, 0), True),
        *(stepped(env, (0, 1), False, Kind(dtype)) for dtype in (torch.bfloat16, torch.float64)),
        *(stepped(env, (0, 1, 1, 0), split, Kind(frozen=("embedding",), tied=True)) for split in (False, True)),
        stepped(env, (0, 1, 1, 0), False, Kind(frozen=("embedding", "layer0"))),  # all of the first stage
    ]
    dist.barrier()
    dist.destroy_process_group()
    return found


def steps_of_replicas(env: Any) -> list[bool]:
    """Of unequal numbers of micro-batches; then pipeline ranks of one replica disagree about its number."""
    found = [stepped(env, (0, 1), split, dp=2) for split in (False, True)]
    stages = [SimpleNamespace(submod=torch.nn.Linear(1, 1), stage_index=0, stage_index_to_group_rank={0: 0, 1: 1})]
    schedule = PlannedSchedule(stages, loss_of, hidden_size=HIDDEN)
    with pytest.raises(ConfigError, match=r"pipeline ranks of replica 1 were given \[1, 2\] micro-batches"):
        schedule._counts(2 if env.rank == 3 else 1)
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_replicas_sum_the_gradients_of_their_own_micro_batches(run_ranks: Any) -> None:
    assert len(SHAPES) % 2
    assert run_ranks(4, steps_of_replicas) == [[True] * 2] * 4


def test_model_parts_have_the_losses_and_gradients_of_one_process(run_ranks: Any) -> None:
    assert run_ranks(2, steps) == [[True] * 9] * 2


def test_a_stage_that_is_told_no_shape_is_refused() -> None:
    (entry,) = torchtitan._entries(None, [{}], None)
    with pytest.raises(ConfigError, match="give positions"):
        torchtitan._shape(entry)

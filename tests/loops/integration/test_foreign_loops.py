"""Loops that are not Megatron-LM's call stock schedules and the drop-in alike, and find the same bits."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dynapipe_ext.executor.stages import megatron_cpu

megatron_cpu.install()
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import finalize_model_grads  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules  # noqa: E402
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402

import dynapipe_ext.megatron as dynapipe  # noqa: E402
from dynapipe_ext.errors import DynaPipeError  # noqa: E402
from dynapipe_ext.executor.drop_in.clone import ENTRY_POINTS, STEP_KEYWORDS  # noqa: E402
from dynapipe_ext.executor.stages.megatron.layers import rotate_without_waiting  # noqa: E402
from dynapipe_ext.executor.stages.megatron.stage import split_megatron_linears  # noqa: E402
from tests.support.megatron_loops import (  # noqa: E402
    LENGTH,
    VOCAB,
    Loop,
    first_layer,
    forward_step,
    global_name,
    start,
)

STEP = {"forward_step_func", "data_iterator", "model", "num_microbatches", "seq_length", "micro_batch_size"}
# What each loop names in its calls of the function, read from the sources of August 2026.
CALLS = {
    "Megatron-Bridge, training": STEP
    | {"decoder_seq_length", "forward_only", "adjust_tensor_shapes_fn", "p2p_communicator", "pg_collection"},
    "Megatron-Bridge, evaluation": STEP
    | {"forward_only", "adjust_tensor_shapes_fn", "p2p_communicator", "pg_collection"},
    "Megatron-Bridge, what is no loss": STEP
    | {"forward_only", "collect_non_loss_data", "p2p_communicator", "pg_collection"},
    "verl": STEP | {"forward_only"},
    "ms-swift": STEP | {"forward_only"},
    "slime, log probabilities": STEP | {"forward_only"},
    "slime, training": STEP | {"decoder_seq_length", "forward_only"},
    "NeMo-RL": STEP | {"decoder_seq_length", "forward_only"},
    "Megatron-LM": STEP
    | {"decoder_seq_length", "forward_only", "first_val_step", "adjust_tensor_shapes_fn", "force_all_reduce"},
}
SHAPES = [(2, 13), (1, 5), (3, 8), (1, 16), (2, 7)]  # rows and positions of ready-cut micro-batches
EVEN = [(2, LENGTH)] * 4


def test_every_argument_of_every_loop_is_taken() -> None:
    ours = inspect.signature(dynapipe.ForwardBackward.__call__)
    for loop, names in CALLS.items():
        assert names <= STEP_KEYWORDS, loop
        ours.bind(None, **dict.fromkeys(names))
    for name in ("no_pipelining", "pipelining_with_interleaving", "pipelining_without_interleaving"):
        stock = inspect.signature(getattr(schedules, f"forward_backward_{name}")).parameters
        taken = {name: parameter.default for name, parameter in ours.parameters.items() if name != "self"}
        assert {name: parameter.default for name, parameter in stock.items()} == taken
    (getter,) = (entry for entry in ENTRY_POINTS if entry.name == "get_forward_backward_func")
    with dynapipe.installed():
        assert getter.parameters == {*inspect.signature(schedules.get_forward_backward_func).parameters}


def megatron_attributes() -> dict[tuple[str, str], object]:
    """What every module of Megatron, and every class in one, has under each of its names."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "megatron":
            for attribute, value in list(vars(module).items()):
                found[name, attribute] = value
                if isinstance(value, type) and value.__module__ == name:
                    found |= {(f"{name}.{attribute}", own): it for own, it in vars(value).items()}
    return found


def test_on_exit_megatron_is_as_it_was_before() -> None:
    """Also what stages replace for good once they are made, and a static method."""
    with dynapipe.installed():
        pass  # all is imported that is
    before = megatron_attributes()
    with dynapipe.installed():
        split_megatron_linears()
        rotate_without_waiting()
        within = megatron_attributes()
    changed = {name for name, value in within.items() if before.get(name) is not value}
    assert len(changed) > 5
    after = megatron_attributes()
    assert {name for name in after.keys() | before.keys() if after.get(name) is not before.get(name)} == set()


def batches(shapes: list[tuple[int, int]]) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    for rows, length in shapes:
        tokens = torch.randint(0, VOCAB, (rows, length + 1), generator=generator)
        mask = (torch.rand(rows, length, generator=generator) < 0.7).float()
        yield {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(), "loss_mask": mask}


class Places:
    """An iterator of slime's kind, without `next`: a place in data that are all there."""

    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        self.data, self.place = list(batches(shapes)), 0

    def get_next(self) -> Any:
        self.place += 1
        return self.data[self.place - 1]


def step_of_places(data_iterator: Places, model: Any) -> Any:
    return forward_step(iter([data_iterator.get_next()]), model)


def step_that_takes_apart(data_iterator: Any, model: Any) -> Any:
    """What it reads cannot be read again; and it draws random numbers."""
    batch = next(data_iterator)
    own = {name: batch.pop(name) for name in list(batch)}
    own["tokens"].masked_fill_(torch.rand(own["tokens"].shape) < 0.2, 0)
    return forward_step(iter([own]), model)


@dataclass(frozen=True)
class Foreign:
    """A loop's manner."""

    shapes: list[tuple[int, int]]
    seq_length: int = 1
    with_groups: bool = False
    step: Callable[..., Any] = forward_step
    data: Callable[[list[tuple[int, int]]], Any] = batches
    keywords: tuple[str, ...] = ()

    @property
    def any_shape(self) -> bool:
        return len(set(self.shapes)) > 1


MANNERS = {
    "Megatron-Bridge": Foreign(EVEN, seq_length=LENGTH, with_groups=True, keywords=("decoder_seq_length",)),
    "Megatron-Bridge, dynamic": Foreign(SHAPES, seq_length=LENGTH, with_groups=True),
    "verl": Foreign(SHAPES),
    "ms-swift": Foreign(SHAPES, seq_length=LENGTH, step=step_that_takes_apart),
    "slime": Foreign(SHAPES, step=step_of_places, data=Places, keywords=("decoder_seq_length",)),
    "NeMo-RL": Foreign(EVEN, seq_length=LENGTH, step=step_that_takes_apart, keywords=("decoder_seq_length",)),
}

# How loops give their data, and shapes: with tensor parallel ranks what each of them does besides is the same.
WITH_TP = ("Megatron-Bridge, dynamic", "slime", "NeMo-RL")


def run(function: Any, manner: Foreign, chunks: list[Any], config: Any, **keywords: Any) -> tuple[Any, Any]:
    """What a step reports, and its gradients by their names in the whole model."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    torch.manual_seed(3)
    config.variable_seq_lengths = manner.any_shape
    if manner.with_groups:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        keywords |= {"pg_collection": groups, "p2p_communicator": P2PCommunicator(pp_group=groups.pp, config=config)}
    keywords |= dict.fromkeys(manner.keywords, manner.seq_length)
    iterators = [manner.data(manner.shapes) for _ in chunks]
    own = {"num_microbatches": len(manner.shapes), "data_iterator": iterators if len(chunks) > 1 else iterators[0]}
    reports = function(
        forward_step_func=manner.step,
        model=chunks,
        seq_length=manner.seq_length,
        micro_batch_size=manner.shapes[0][0],
        **{**own, **keywords},
    )
    gradients = {
        global_name(name, first_layer(chunk.module)): parameter.main_grad.clone()
        for chunk in chunks
        for name, parameter in chunk.module.named_parameters()
    }
    return [report["lm loss"].tolist() for report in reports], gradients


def same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    return one[0] == other[0] and all(torch.equal(one[1][name], gradient) for name, gradient in other[1].items())


def run_manners(env: Any) -> tuple[dict[Any, bool], dict[str, Any], list[str]]:
    dist.init_process_group("gloo", rank=env.rank, world_size=env.world_size, init_method=env.init_method)
    settings = dynapipe.DropInSettings
    found: dict[Any, bool] = {}
    losses: dict[str, Any] = {}
    for place, loop in {"PP2": Loop(pp=2), "TP2 PP2": Loop(tp=2, pp=2)}.items():
        chunks, config = start(loop)
        ours = dynapipe.ForwardBackward()
        for name in MANNERS if loop.tp == 1 else WITH_TP:
            manner = MANNERS[name]
            stock = run(get_forward_backward_func(pp_size=2, vp_size=None), manner, chunks, config)
            mine = run(ours.of_sizes(2, None), manner, chunks, config)
            forwards = run(ours, manner, chunks, config, forward_only=True)
            found[place, name] = same(mine, stock) and forwards[0] == stock[0]
        losses[place] = stock_verl = run(get_forward_backward_func(), MANNERS["verl"], chunks, config)
        asked = settings(shape_of=lambda batch: tuple(batch["tokens"].shape))
        found[place, "shapes by the caller"] = same(
            run(dynapipe.ForwardBackward(asked), MANNERS["verl"], chunks, config), stock_verl
        )
        split = run(dynapipe.ForwardBackward(settings(split_backward=True)), MANNERS["verl"], chunks, config)
        losses[f"{place}, split"] = split
    refused = refusals(chunks, config)
    found["messages"] = messages_a_step(chunks, config) == messages_a_step(chunks, config, 2) == 2
    chunks, config = start(Loop(pp=2, chunks=2))
    losses["VPP2"] = run(dynapipe.ForwardBackward().of_sizes(2, 2), MANNERS["verl"], chunks, config)
    dist.destroy_process_group()
    return found, losses, refused


def messages_a_step(chunks: list[Any], config: Any, times: int = 1) -> int:
    """Collectives of a pipeline's ranks in forwards of so many times the micro-batches: a size and the shapes."""
    group, own = parallel_state.get_pipeline_model_parallel_group(), dynapipe.ForwardBackward()
    manner = Foreign(SHAPES * times)
    run(own, manner, chunks, config, forward_only=True)
    before = group._get_sequence_number_for_group()
    run(own, manner, chunks, config, forward_only=True)
    return int(group._get_sequence_number_for_group() - before)


def refusals(chunks: list[Any], config: Any) -> list[str]:
    said = []
    groups = ProcessGroupCollection.use_mpu_process_groups()
    others = ProcessGroupCollection.use_mpu_process_groups()
    others.pp = groups.dp_cp if groups.dp_cp.size() > 1 else groups.tp
    communicator = P2PCommunicator(pp_group=groups.pp, config=config)

    class Other(P2PCommunicator):
        pass

    given = [
        {"pg_collection": groups},
        {"p2p_communicator": communicator},
        {"pg_collection": object()},
        {"pg_collection": groups, "p2p_communicator": Other(pp_group=groups.pp, config=config)},
        {"pg_collection": others, "p2p_communicator": communicator},
    ]
    for keywords in given:
        with pytest.raises(DynaPipeError) as error:
            run(dynapipe.ForwardBackward(), MANNERS["verl"], chunks, config, **keywords)
        said.append(str(error.value))
    ours = dynapipe.ForwardBackward()
    for function, manner in (
        (ours.of_sizes(4, None), MANNERS["verl"]),
        (ours.of_sizes(2, 2), MANNERS["verl"]),
        (ours, Foreign(SHAPES, step=lambda data_iterator, model: next(data_iterator))),
        (dynapipe.ForwardBackward(dynapipe.DropInSettings(shape_of=lambda _: (1, 2, 3))), MANNERS["verl"]),
    ):
        with pytest.raises(DynaPipeError) as error:
            run(function, manner, chunks, config)
        said.append(str(error.value))
    for keywords in (
        {"adjust_tensor_shapes_fn": lambda *shapes: shapes},
        {"num_microbatches": 2.0},
        {"num_microbatches": 0},
        {"data_iterator": []},
        {"data_iterator": [iter(()), iter(())]},
    ):
        with pytest.raises(DynaPipeError) as error:
            run(ours, MANNERS["verl"], chunks, config, **keywords)
        said.append(str(error.value))
    return said


TOLD = [
    "pg_collection was given without p2p_communicator",
    "p2p_communicator was given without pg_collection",
    "pg_collection is a object without tp",
    "p2p_communicator is a Other",
    "p2p_communicator sends among ranks",
    "get_forward_backward_func was asked for pp_size 4",
    "1 model chunks were given where Megatron's state or vp_size says 2",
    "forward_step does not call the first stage's model",
    "shape_of says (1, 2, 3)",
    "adjust_tensor_shapes_fn was given, which is for messages of one shape",
    "num_microbatches is 2.0 but must be an integer of at least 1",
    "num_microbatches is 0 but must be an integer of at least 1",
    "data_iterator is a list of 0 for 1 model chunks",
    "data_iterator is a list of 2 for 1 model chunks",
]


def test_a_foreign_loop_finds_the_bits_of_stock_schedules(run_ranks: Any) -> None:
    ranks = run_ranks(4, run_manners)
    for rank, (found, losses, refused) in enumerate(ranks):
        assert all(found.values()), (rank, found)
        assert [message[: len(told)] for message, told in zip(refused, TOLD, strict=True)] == TOLD
        for place in ("PP2", "TP2 PP2"):
            assert losses[f"{place}, split"][0] == losses[place][0]  # whatever the order, reports are in that of entry
            for name, gradient in losses[place][1].items():
                assert torch.allclose(losses[f"{place}, split"][1][name], gradient, rtol=1e-5, atol=1e-6), name
        assert losses["VPP2"][0] == losses["PP2"][0]
    assert len(ranks[3][1]["PP2"][0]) == len(SHAPES)


def whole_mean(data_iterator: Any, model: Any) -> Any:
    """A loss function of two values, whose report has more than tensors."""
    output, loss_of_tokens = forward_step(data_iterator, model)

    def mean(output: torch.Tensor) -> Any:
        loss, num_tokens, report = loss_of_tokens(output)
        return loss / num_tokens, {**report, "rows": 2, "said": "odd"}

    return output, mean


def of_closure(data_iterator: None, model: Any) -> Any:
    """It reads no iterator: each call finds the same batch."""
    return forward_step(batches(EVEN), model)


def of_masks_of_nothing(data_iterator: Any, model: Any) -> Any:
    """Every other row has no target."""
    batch = next(data_iterator)
    batch["loss_mask"][::2] = 0
    return forward_step(iter([batch]), model)


ODD: dict[str, tuple[Foreign, dict[str, Any]]] = {
    "one micro-batch": (Foreign([(3, 7)], seq_length=7), {}),
    "one of its own shape": (Foreign([(3, 7)]), {"any_shape": True}),
    "even, sent as any shape": (Foreign(EVEN), {"any_shape": True}),
    "a number of numpy's": (Foreign(EVEN, seq_length=LENGTH), {"num_microbatches": np.int64(3)}),
    "lists of one": (Foreign(SHAPES), {"in_lists": True}),
    "no iterator": (Foreign(EVEN, seq_length=LENGTH, step=of_closure, data=lambda _: None), {}),
    "rows that nobody says": (Foreign(SHAPES), {"micro_batch_size": None}),
    "another decoder's length": (Foreign(SHAPES), {"decoder_seq_length": 3}),
    "reduced by all": (Foreign(SHAPES), {"force_all_reduce": True}),
    "first of validation": (Foreign(SHAPES), {"forward_only": True, "first_val_step": True}),
    "later in validation": (Foreign(EVEN, seq_length=LENGTH), {"forward_only": True, "first_val_step": False}),
    "two values": (Foreign(SHAPES, step=whole_mean), {}),
    "two values, forwards": (Foreign(SHAPES, step=whole_mean), {"forward_only": True}),
    "what is no loss": (Foreign(SHAPES), {"forward_only": True, "collect_non_loss_data": True}),
    "more than fill the pipeline": (Foreign(SHAPES * 3), {}),
    "reduced by DDP, without overlap": (Foreign(SHAPES), {"no_sync": True}),
    "its own start of reductions": (Foreign(EVEN, seq_length=LENGTH), {"no_sync": True, "starts": True}),
    "masks of nothing": (Foreign(SHAPES, step=of_masks_of_nothing), {}),
    "its own end of a step": (Foreign(SHAPES), {"finalizes": True}),
}
# What meets a loss that is a mean of means.
MEANS = ("even, sent as any shape", "reduced by all", "two values", "masks of nothing", "its own end of a step")


def odd_step(function: Any, chunk: Any, config: Any, manner: Foreign, asked: dict[str, Any]) -> Any:
    """All that a step returns and leaves: reports, what is left of the data, gradients, the state of autograd."""
    asked = dict(asked)
    chunk.zero_grad_buffer()
    torch.manual_seed(3)
    config.variable_seq_lengths = asked.pop("any_shape", manner.any_shape)
    told: list[Any] = []
    if asked.pop("no_sync", False):
        config.no_sync_func = chunk.no_sync
    if asked.pop("starts", False):
        config.grad_sync_func = lambda parameters: told.append(len(list(parameters)))
    if asked.pop("finalizes", False):
        config.finalize_model_grads_func = partial(told_at_the_end, told, config.finalize_model_grads_func)
    in_lists, data = asked.pop("in_lists", False), manner.data(manner.shapes)
    sizes = {"seq_length": manner.seq_length, "micro_batch_size": manner.shapes[0][0]}
    reports = function(
        forward_step_func=manner.step,
        data_iterator=[data] if in_lists else data,
        model=[chunk] if in_lists else chunk,
        **{"num_microbatches": len(manner.shapes), **sizes, **asked},
    )
    config.no_sync_func = config.grad_sync_func = None
    config.finalize_model_grads_func = finalize_model_grads
    gradients = [parameter.main_grad.tolist() for parameter in chunk.parameters()]
    left = None if data is None else len(list(data))
    return _as_lists(reports), left, gradients, torch.is_grad_enabled(), config.variable_seq_lengths, told


def told_at_the_end(told: list[Any], own: Callable[..., Any], chunks: Any, num_tokens: Any, **groups: Any) -> None:
    told.append((len(chunks), None if num_tokens is None else int(num_tokens)))
    own(chunks, num_tokens, **groups)


def _as_lists(value: Any) -> Any:
    match value:
        case torch.Tensor():
            return value.tolist()
        case dict():
            return {name: _as_lists(one) for name, one in value.items()}
        case list():
            return [_as_lists(one) for one in value]
    return value


def run_odd(env: Any) -> dict[Any, bool]:
    dist.init_process_group("gloo", rank=env.rank, world_size=env.world_size, init_method=env.init_method)
    found = {}
    for place, loop in {"PP1": Loop(), "PP2": Loop(pp=2), "PP2, means": Loop(pp=2, per_token=False)}.items():
        (chunk,), config = start(loop)
        functions = get_forward_backward_func(), dynapipe.ForwardBackward()
        for name in ODD if loop.per_token else MEANS:
            manner, asked = ODD[name]
            stock, ours = (odd_step(function, chunk, config, manner, asked) for function in functions)
            found[place, name] = stock == ours
    dist.destroy_process_group()
    return found


def test_odd_arguments_have_the_meaning_and_the_bits_of_stock_schedules(run_ranks: Any) -> None:
    for rank, found in enumerate(run_ranks(2, run_odd)):
        assert all(found.values()), (rank, [case for case, same in found.items() if not same])


def doubled_width(env: Any) -> bool:
    """`adjust_tensor_shapes_fn` for a stage that sends more than hidden states, as distillation's does."""
    dist.init_process_group("gloo", rank=env.rank, world_size=env.world_size, init_method=env.init_method)
    (chunk,), config = start(Loop(pp=2))
    is_first = parallel_state.is_pipeline_first_stage()
    model = chunk.module
    wide = model.forward

    def forward(*arguments: Any, **keywords: Any) -> torch.Tensor:
        output: torch.Tensor = wide(*arguments, **keywords)
        return torch.cat([output, output.detach()], dim=-1) if is_first else output

    model.forward = forward
    if not is_first:
        take = model.set_input_tensor
        model.set_input_tensor = lambda given: take([one[..., : config.hidden_size] for one in given])

    def adjust(received: Any, sent: Any) -> Any:
        twice = [(*shape[:-1], 2 * shape[-1]) for shape in sent]
        return (received, twice) if is_first else (twice, sent)

    manner = MANNERS["NeMo-RL"]
    both = [
        run(function, manner, [chunk], config, adjust_tensor_shapes_fn=adjust)
        for function in (get_forward_backward_func(), dynapipe.ForwardBackward())
    ]
    dist.destroy_process_group()
    return same(*both)


def test_messages_have_the_shapes_that_a_loop_adjusts(run_ranks: Any) -> None:
    assert run_ranks(2, doubled_width) == [True, True]

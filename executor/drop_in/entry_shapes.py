"""Shapes of micro-batches that a loop has cut itself: read ahead on the first stage, sent to its pipeline once a step.

Before its first forward of a step the first stage reads all batches from the iterator, reads the rows and length of
each, and keeps it for its forward. So every rank posts receives of the right shape, and no message carries a shape.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from dynapipe_ext.batch.topology import TensorSpec
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.device import send_json
from dynapipe_ext.executor.drop_in.forward_step import LoopStep
from dynapipe_ext.executor.drop_in.pipeline import MegatronPipeline
from dynapipe_ext.executor.instructions import ExecutionPlan, Forward, Instruction, Recv, Send
from dynapipe_ext.executor.stages.megatron.stage import replay_megatron, unwrapped

EntryShape = tuple[int, int]  # rows and positions of what the model is given
ShapeOf = Callable[[Any], EntryShape]  # of what a data iterator's `next` gives

_OR_SAY = "give shape_of, which tells rows and length of what the data iterator yields"


def shapes_of_entries(
    step: LoopStep, pipeline: MegatronPipeline, pp_group: Any, shape_of: ShapeOf | None
) -> tuple[tuple[EntryShape, ...], LoopStep]:
    """The shape of every micro-batch in order of entry, and the step with a first iterator that still yields the
    batches read ahead.

    A collective call of a pipeline's ranks. Without `shape_of` the first stage calls `forward_step_func` on copies of
    the data, up to its call of the model, and reads the shape of `input_ids`. Errors: ConfigError, on all ranks, where
    that gives no shape.
    """
    topology, place = pipeline.topology, pipeline.coordinates
    first_rank = topology.rank(tp_rank=place.tp_rank, pp_rank=topology.stage_ranks[0], dp_rank=place.dp_rank)
    answer: dict[str, Any] = {}
    if place.pp_rank == topology.stage_ranks[0]:
        source = step.iterators[0]
        if hasattr(source, "__next__"):
            source = _ReadAhead(source)
            step = replace(step, iterators=[source, *step.iterators[1:]])
        try:
            answer["shapes"] = _shapes_read_ahead(step, source, pipeline.device, shape_of)
        except ConfigError as error:
            answer["refused"] = str(error)
    answer = send_json(answer, first_rank, pp_group, pipeline.device)
    if "refused" in answer:
        raise ConfigError(answer["refused"])
    return tuple((rows, length) for rows, length in answer["shapes"]), step


def in_order_of_entry(plan: ExecutionPlan) -> bool:
    """Whether each of the rank's stages runs its forwards in that order."""
    forwards = [one for one in plan.instructions if isinstance(one, Forward)]
    entered = [[one.micro_batch for one in forwards if one.stage == stage] for stage in plan.stages]
    return all(order == sorted(order) for order in entered)


def in_any_order(step: LoopStep) -> list[Callable[[int], Any]]:
    """Of each chunk, an iterator of one micro-batch by its place in the order of entry: for plans of another order.

    Errors: ConfigError for data that are not read by `next`.
    """

    def of_chunk(source: Any) -> Callable[[int], Any]:
        if source is None:
            return lambda _: None
        if not hasattr(source, "__next__"):
            raise ConfigError(
                f"the data iterator is a {type(source).__name__} without __next__, so micro-batches of any length run"
                " in its order alone: leave split_backward, placement v and memory_limit_gb out"
            )
        entries = [next(source) for _ in range(step.num_micro_batches)]
        return lambda micro_batch: iter([entries[micro_batch]])

    return [of_chunk(source) for source in step.iterators]


def with_adjusted_shapes(plan: ExecutionPlan, spec: TensorSpec, adjust: Callable[..., Any]) -> ExecutionPlan:
    """The plan of a rank with one stage, its messages in the shapes that `adjust_tensor_shapes_fn` makes of `spec`.

    Errors: ConfigError where it makes other than one shape of one.
    """
    adjusted = adjust([spec.shape], [spec.shape])
    if [len(shapes) for shapes in adjusted] != [1, 1]:
        raise ConfigError(
            f"adjust_tensor_shapes_fn makes {adjusted} of one shape received and one sent, but a stage takes and gives"
            " one tensor: make one of each"
        )
    received, sent = (replace(spec, shape=tuple(shape)) for (shape,) in adjusted)

    def changed(instruction: Instruction) -> Instruction:
        if not isinstance(instruction, Send | Recv):
            return instruction
        below = (instruction.buffer.payload == "activation") == isinstance(instruction, Recv)
        return replace(instruction, specs=(received if below else sent,))

    return replace(plan, instructions=tuple(changed(instruction) for instruction in plan.instructions))


class _ReadAhead(Iterator[Any]):
    """A data iterator that yields batches also if `look` has read them before."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source, self._kept = source, deque[Any]()

    def __next__(self) -> Any:
        return self._kept.popleft() if self._kept else next(self._source)

    def look(self) -> Any:
        self._kept.append(next(self._source))
        return self._kept[-1]


class _Copies(Iterator[Any]):
    """What a `forward_step` may take apart while it is asked for a shape."""

    def __init__(self, source: _ReadAhead) -> None:
        self._source = source

    def __next__(self) -> Any:
        item = self._source.look()
        try:
            return copy.deepcopy(item)
        except Exception as error:
            raise ConfigError(f"a {type(item).__name__} of the data cannot be copied ({error}): {_OR_SAY}") from error


class _Reached(BaseException):
    """The model was called: no Exception, which a loop might catch."""

    def __init__(self, input_ids: Any) -> None:
        self.input_ids = input_ids


def _shapes_read_ahead(step: LoopStep, source: Any, device: torch.device, shape_of: ShapeOf | None) -> list[EntryShape]:
    count = range(step.num_micro_batches)
    if shape_of is not None:
        if not isinstance(source, _ReadAhead):
            raise ConfigError(
                f"shape_of was given but a data iterator is a {type(source).__name__} without __next__: leave it out"
            )
        return [_checked(shape_of(source.look()), "shape_of") for _ in count]
    # A loop's own class of iterator has a place in data that are all there: a copy moves on alone.
    copied = _Copies(source) if isinstance(source, _ReadAhead) else copy.copy(source)
    return [_shape_by_forward_step(step, copied, device) for _ in count]


def _shape_by_forward_step(step: LoopStep, data_iterator: Any, device: torch.device) -> EntryShape:
    """Run `forward_step` up to its call of the model, whose `input_ids` have the shape. Random numbers are drawn again
    in the real forward."""
    hook = unwrapped(step.chunks[0]).register_forward_pre_hook(_reached, prepend=True, with_kwargs=True)
    try:
        with replay_megatron(device)(), torch.no_grad():
            step.forward_step_func(data_iterator, step.chunks[0])
    except _Reached as reached:
        input_ids = reached.input_ids
        if not isinstance(input_ids, torch.Tensor):
            raise ConfigError(f"forward_step calls the model with no tensor of input_ids: {_OR_SAY}") from None
        return _checked(input_ids.shape, "input_ids")
    finally:
        hook.remove()
    raise ConfigError(f"forward_step does not call the first stage's model: {_OR_SAY}")


def _reached(_model: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    raise _Reached(keywords.get("input_ids", arguments[0] if arguments else None))


def _checked(shape: Sequence[int], what: str) -> EntryShape:
    if len(shape) != 2 or min(shape) < 1:
        raise ConfigError(f"{what} says {tuple(shape)} where rows and length are needed, both at least 1: {_OR_SAY}")
    return int(shape[0]), int(shape[1])

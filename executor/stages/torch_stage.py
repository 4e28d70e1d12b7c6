"""A Stage made of plain torch modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from dynapipe_ext.batch.micro_batches import MicroBatch
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.events import PreferenceFigures
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.protocols import Batch, Reductions, Tensors
from dynapipe_ext.executor.stages.chunk_runner import ChunkRunner, GradientAccumulator, PlainAccumulator
from dynapipe_ext.executor.stages.joined_ranks import ALONE, Joined
from dynapipe_ext.executor.stages.position_losses import LossOfPairs
from dynapipe_ext.executor.stages.split_linear import make_linears_splittable

Module = Callable[..., Any]
LossFunction = Callable[[Any, Batch], torch.Tensor | LossOfPairs]
_REDUCERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
MakeAccumulator = Callable[..., GradientAccumulator]  # of the parameters that train, and their sum over replicas


class TorchStage:
    """One or more stages of torch modules: `modules` is the only one, or this rank's in the order of its stages.

    A module maps hidden states, or on stage 0 the batch's "tokens", to hidden states or outputs; one whose `forward`
    has a parameter `batch`, or takes two arguments, gets the micro-batch as well. A mapping by stage may hold any
    callables of (hidden states or tokens, batch), together with `parameters`. `loss(output, batch)` returns the
    weighted sum over the micro-batch's positions, which the step divides by the plan's loss divisor. A batch has what
    `collate` made: "tokens", "labels", "loss_weights" and "position_ids", each (rows, length), and "cu_seqlens" where
    documents are packed.

    `restarts_attention` says that no position sees another document of a packed row, as modules do that keep to
    "cu_seqlens" (`check_packing` proves it of transformers models) or have no attention; without it such rows are
    refused.

    `measure_bytes` counts stored activations with saved-tensor hooks, without which only inputs and outputs count as
    held.

    `joined` (`join_ranks`) are the ranks with which plans may join this one, by width, for modules whose attention
    reaches the other slices of a row: batch["joined"] are then those of the step, a JoinedRanks.

    `parallel` (a `ParallelContext`) sums over ranks: needed where the plan has more than one. Split backwards put off
    the weight gradients of torch.nn.Linear layers. Whether modules train or evaluate is theirs (`train()`, `eval()`).
    Gradients are left in `parameter.grad`, of 16-bit weights summed in float32 and rounded once; of weights that no
    micro-batch used it is None. Nothing ties weights over ranks: one that stages of two ranks use is two weights from
    the first step on.
    Errors: ConfigError for what cannot be trained so, such as modules that reduce gradients themselves.
    """

    takes_pieces = False  # whether attention reaches earlier pieces of a cut sample

    def __init__(
        self,
        modules: torch.nn.Module | Sequence[torch.nn.Module] | Mapping[int, Module],
        loss: LossFunction,
        *,
        parameters: Iterable[torch.nn.Parameter] | None = None,
        accumulator: MakeAccumulator = PlainAccumulator,
        parallel: Reductions | None = None,
        restarts_attention: bool = False,
        measure_bytes: bool = False,
        joined: Joined = ALONE,
    ) -> None:
        if not callable(loss):
            raise ConfigError(f"the loss is a {type(loss).__name__} but must be a function of (output, batch)")
        _refuse_other_arguments(loss)
        chunks = _chunks(modules)
        owners = [chunk for chunk in chunks if isinstance(chunk, torch.nn.Module)]
        if parameters is None:
            _refuse_ownerless(chunks)
            parameters = {p: None for owner in owners for p in owner.parameters()}
        own = list(parameters)
        trained = [p for p in own if p.requires_grad]
        _refuse_reducers(owners)
        self._own, self._trains = own, [p.requires_grad for p in own]
        self._owners, self._known = owners, {*own}
        self._batch_norms = [m for owner in owners for m in owner.modules() if isinstance(m, _BatchNorm)]
        self._stages = tuple(modules) if isinstance(modules, Mapping) else None
        self._calls = [with_batch(chunk, chunk) for chunk in chunks]
        self._loss, self._parallel, self._restarts_attention = loss, parallel, restarts_attention
        gradients = accumulator(trained, parallel.sum_over_replicas if parallel else None)

        def make_splittable() -> list[torch.Tensor]:
            return [weight for owner in owners for weight in make_linears_splittable(owner)]

        self._runner = ChunkRunner(
            [_has_trained(chunk, trained) for chunk in chunks],
            gradients,
            parameters=own,
            make_splittable=make_splittable,
            device=own[0].device if own else torch.device("cpu"),
            measure_bytes=measure_bytes,
            joined=joined,
        )

    def start_step(self, plan: ExecutionPlan) -> None:
        """Errors: ConfigError where the plan is for other stages or ranks than these."""
        _check_ranks(plan, self._parallel)
        if self._stages is not None and self._stages != plan.stages:
            raise ConfigError(
                f"pipeline rank {plan.pp_rank} runs stages {plan.stages} of the plan but has modules for"
                f" {self._stages}: give those, in that order"
            )
        if not plan.forward_only:
            _refuse_other_trained(self._trains, [p.requires_grad for p in self._own], plan.step)
            _refuse_new_weights(self._owners, self._known, plan.step)
            _refuse_batch_statistics(self._batch_norms)
        if not self.takes_pieces:
            _refuse_pieces(plan)
        if not self._restarts_attention:
            _refuse_documents(plan)
        self._runner.start_step(plan)
        self._plan, self._calls_of = plan, dict(zip(plan.stages, self._calls, strict=True))

    def load(self, micro_batch: int, batch: Batch) -> None:
        """Errors: DataError for tokens of other rows than planned."""
        names = [name for name in batch if name.endswith("tokens")]
        check_rows(batch, self._plan.micro_batches[micro_batch], f"micro-batch {micro_batch}", names)
        self._runner.load(micro_batch, batch)

    def forward(self, stage: int, micro_batch: int, inputs: Tensors) -> Tensors:
        call = partial(self._call, stage, micro_batch)
        return self._runner.forward(stage, micro_batch, inputs, call)

    def backward(self, stage: int, micro_batch: int, output_grads: Tensors) -> Tensors:
        return self._runner.backward(stage, micro_batch, output_grads)

    def backward_input(self, stage: int, micro_batch: int, output_grads: Tensors) -> Tensors:
        return self._runner.backward_input(stage, micro_batch, output_grads)

    def backward_weight(self, stage: int, micro_batch: int) -> None:
        self._runner.backward_weight(stage, micro_batch)

    def finish_step(self) -> float:
        return self._runner.finish_step(self._parallel.sum_over_job if self._parallel else _only_rank)

    def losses(self) -> dict[int, float]:
        """Micro-batch -> its share of the step's loss; empty where the last stage does not run."""
        return self._runner.losses()

    def preferences(self) -> PreferenceFigures | None:
        """Of the last step, over all ranks, where its loss is of pairs of answers."""
        return self._runner.preferences

    def held_bytes(self) -> int:
        return self._runner.held_bytes()

    def _call(self, stage: int, micro_batch: int, batch: Batch, *inputs: torch.Tensor) -> Any:
        if not inputs:
            if "tokens" not in batch:
                raise DataError(f'stage 0 reads batch["tokens"], but the collate function gave {sorted(batch)}')
            inputs = (batch["tokens"],)
        output = self._calls_of[stage](*inputs, batch)
        if stage != self._plan.num_stages - 1:
            return output
        return self._loss(output, batch)


_DECODER_ROWS = frozenset(("decoder_tokens", "labels", "loss_weights"))  # else the encoder's where there is no decoder
_ROWS_BY_SIDE = _DECODER_ROWS | {"tokens", "encoder_tokens", "position_ids"}


def check_rows(batch: Batch, planned: MicroBatch, name: str, names: Collection[str]) -> None:
    """Errors: DataError where one of `names` begins with other dimensions than (rows, length) as planned."""
    for key in _ROWS_BY_SIDE & set(names):
        of_decoder = key in _DECODER_ROWS and planned.decoder_len
        shape, tensor = (planned.rows, planned.decoder_len if of_decoder else planned.encoder_len), batch[key]
        if isinstance(tensor, torch.Tensor) and tensor.shape[:2] != shape:
            raise DataError(
                f"{key} of {name} has shape {tuple(tensor.shape)}, not {shape} as planned: give collate functions that"
                " keep to the plan"
            )


def _chunks(modules: Any) -> list[Module]:
    if isinstance(modules, torch.nn.Module) and not isinstance(modules, torch.nn.ModuleList):
        return [modules]
    chunks = list(modules.values()) if isinstance(modules, Mapping) else None
    if chunks is None and isinstance(modules, Sequence | torch.nn.ModuleList):
        chunks = list(modules)
    if not chunks or not all(callable(chunk) for chunk in chunks):
        raise ConfigError(
            f"TorchStage was given {type(modules).__name__} but takes a module, a list of this rank's modules in the"
            " order of their stages, or a mapping from stage to module"
        )
    return chunks


def _has_trained(chunk: object, trained: Sequence[torch.Tensor]) -> bool:
    """Whether any of these weights is the chunk's; whose a function's are, nobody knows."""
    return bool(trained) and (not isinstance(chunk, torch.nn.Module) or not {*trained}.isdisjoint(chunk.parameters()))


def _refuse_other_arguments(loss: LossFunction) -> None:
    try:
        signature = inspect.signature(loss)
    except ValueError:  # of some functions written in C nobody knows it
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise ConfigError(f"the loss takes {signature} but must be a function of (output, batch)") from None


def _refuse_ownerless(chunks: Iterable[Module]) -> None:
    for chunk in chunks:
        if not isinstance(chunk, torch.nn.Module):
            raise ConfigError(
                f"{getattr(chunk, '__name__', chunk)!r} is no torch module, so the weights that it uses cannot be"
                " found, and their gradients would never be cleared nor reduced: give parameters=model.parameters()"
            )


def _refuse_reducers(owners: Iterable[torch.nn.Module]) -> None:
    for module in (module for owner in owners for module in owner.modules()):
        if reducers := _REDUCERS & {kind.__name__ for kind in type(module).__mro__}:
            raise ConfigError(
                f"the stage's module is wrapped in {reducers.pop()}, whose collectives run in every backward, of which"
                " replicas may have unequal numbers: give the module itself, and parallel=ParallelContext(topology),"
                " which sums gradients once a step"
            )


def _refuse_batch_statistics(modules: Iterable[torch.nn.Module]) -> None:
    if training := [type(module).__name__ for module in modules if module.training]:
        raise ConfigError(
            f"{training[0]} would take its mean and variance of each micro-batch, padding too, so that another plan"
            " of the same samples would train another model: freeze it by eval(), or normalise by LayerNorm"
        )


def _refuse_other_trained(before: list[bool], now: list[bool], step: int) -> None:
    if changed := sum(a != b for a, b in zip(before, now, strict=True)):
        raise ConfigError(
            f"{changed} weights were frozen or thawed between the making of the stage and step {step}, and it clears"
            " and reduces the gradients of those that trained then: make the stage anew, and the executor"
        )


def _refuse_new_weights(owners: Sequence[torch.nn.Module], known: set[torch.nn.Parameter], step: int) -> None:
    """Errors: ConfigError for weights that train and that the stage does not know: their gradients would add up from
    step to step."""
    for owner in owners:
        for name, weight in owner.named_parameters():
            if weight.requires_grad and weight not in known:
                raise ConfigError(
                    f"the weight {name} trains in step {step}, but the stage does not know it, and neither clears nor"
                    " reduces its gradient: make the stage anew where weights were replaced (load_state_dict with"
                    " assign, a new head, resized embeddings), and give all that train, or freeze it"
                )


def with_batch(chunk: Module, inner: Module) -> Module:
    """`chunk` as a function of (inputs…, batch); it takes what `inner`, itself or what it wraps, takes."""
    if not isinstance(inner, torch.nn.Module):
        return chunk
    named = inspect.signature(inner.forward).parameters
    required = [p for p in named.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if "batch" in named:
        return lambda *inputs_and_batch: chunk(*inputs_and_batch[:-1], batch=inputs_and_batch[-1])
    return chunk if len(required) > 1 else lambda *inputs_and_batch: chunk(*inputs_and_batch[:-1])


def _check_ranks(plan: ExecutionPlan, parallel: Reductions | None) -> None:
    pp, dp = max(plan.stage_ranks) + 1, len(plan.num_micro_batches) * plan.width
    if parallel is None:
        if pp * dp > 1:
            raise ConfigError(
                f"the plan is for pp {pp} x dp {dp} but this stage sums neither gradients nor losses over ranks: give"
                " TorchStage parallel=ParallelContext(topology)"
            )
        return
    topology = parallel.topology
    if (topology.pp, topology.dp) != (pp, dp):
        raise ConfigError(
            f"the plan is for pp {pp} x dp {dp} but parallel= is for pp {topology.pp} x dp {topology.dp}:"
            " make both from one topology"
        )
    if topology.tp > 1:
        raise ConfigError(f"tp is {topology.tp} but torch modules are not cut over tensor parallel ranks: give tp 1")


def _refuse_documents(plan: ExecutionPlan) -> None:
    """Refuse rows whose documents must not see one another."""
    for number, m in enumerate(plan.micro_batches):
        if m.layout == "packed" and m.attention == "document" and len(m.samples) > 1:
            raise ConfigError(
                f"micro-batch {number} of step {plan.step} packs {len(m.samples)} documents into a row, and attention"
                ' that runs across them would train wrongly: where the modules restart it at batch["cu_seqlens"]'
                " (check_packing proves it of transformers models) or have none, give TorchStage"
                ' restarts_attention=True, else plan with layout="padded"'
            )


def _refuse_pieces(plan: ExecutionPlan) -> None:
    for number, m in enumerate(plan.micro_batches):
        if m.attention == "carried":
            raise ConfigError(
                f"micro-batch {number} of step {plan.step} has a piece of sample {m.samples[0].index}, whose attention"
                " to earlier pieces torch modules do not have: plan whole samples, or train a transformers model by"
                " TransformersStage"
            )


def _only_rank(_: torch.Tensor) -> None:
    """The sum over a single rank."""

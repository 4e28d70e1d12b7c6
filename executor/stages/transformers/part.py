"""A stage of a model of transformers: the model itself, its other layers places in which hidden states pass through."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch.nn.modules.module import _global_forward_hooks

from dynapipe_ext.batch.micro_batches import MicroBatch
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.device import runs_kernels
from dynapipe_ext.executor.protocols import Batch
from dynapipe_ext.executor.stages.chunk_runner import HEAD_SLICE_KEY, HeadSlices, seed_of, seed_torch
from dynapipe_ext.executor.stages.sliced_head import HiddenStates, keep_readable
from dynapipe_ext.executor.stages.transformers.few_passes import compute_in_few_passes
from dynapipe_ext.executor.stages.transformers.head import LeftHead
from dynapipe_ext.executor.stages.transformers.layers import PartPlace, with_own_modules
from dynapipe_ext.models.layer_pattern import LayerPattern
from dynapipe_ext.models.module_tree import Rate


class TransformersPart(torch.nn.Module, ABC):
    """One stage of a model: (ids or what the stage before sent …, batch) -> what the next one takes, or logits.

    `model` is a PreTrainedModel whose layers keep their numbers and names; adapters go into it
    (`part.model.add_adapter(…)`). `batch` holds "model_inputs", further arguments of its forward, and where layers
    draw random numbers "random_key", of which those of each layer are made. Training is the model's own mode.
    `holders` are the stages that hold each weight that several hold, in order, by its name in the whole model, and
    `shared` those of them that are here.
    """

    pattern: LayerPattern | None = None  # by which it was cut; a T5 has none
    loaded_dropout: Sequence[Rate] = ()  # of the configuration, before it got the run's

    def __init__(
        self, model: Any, place: PartPlace, layers: Mapping[int, Any], holders: Mapping[str, tuple[int, ...]]
    ) -> None:
        super().__init__()
        self.model, self.place, self.holders = model, place, dict(holders)
        self.training = model.training
        self.shared = {name: model.get_parameter(name) for name, at in holders.items() if place.stage in at}
        self.own_layers = dict(layers)  # those of this stage, by their numbers
        self._key = ""
        self._is_engines = False
        self._is_settled = False  # whether its modules take our kernels where they can
        self._left_head = LeftHead(model)
        for number, layer in self.own_layers.items():
            self._seed_before(layer, f"layer {number}")

    @abstractmethod
    def _run(self, inputs: Sequence[torch.Tensor], batch: Batch) -> Any:
        """The forward, once random numbers are settled."""

    @abstractmethod
    def fault(self, micro_batch: MicroBatch) -> str:
        """Why a micro-batch cannot be trained exactly; nothing if it can."""

    @abstractmethod
    def check_slices(self) -> None:
        """Errors: ConfigError where this rank cannot compute a slice of a row whose other slices other ranks have."""

    @abstractmethod
    def model_inputs(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """What the model's forward needs beside ids or hidden states; it follows from the plan, on every stage."""

    @abstractmethod
    def checked(self, batch: Batch, micro_batch: MicroBatch, name: str) -> Batch:
        """The batch, "tokens" what stage 0 reads. Errors: DataError for one that the plan does not have, by `name`."""

    def forward(self, *inputs: torch.Tensor, batch: Batch) -> Any:
        if not self._is_settled:  # its weights are where they stay
            self._is_settled = True
            if runs_kernels(next(self.model.parameters())):
                compute_in_few_passes(self.model)
        draws = self.model.training and "random_key" in batch
        devices = [inputs[0].device] if inputs[0].is_cuda else []
        with torch.random.fork_rng(devices=devices, enabled=draws):
            self._key = batch["random_key"] if draws else ""
            output = self._run(inputs, batch)
            self._key = ""
        return output

    def _logits(self, forward: Callable[[], Any], batch: Batch) -> torch.Tensor | HiddenStates:
        """Of the last stage, whose whole forward this is; hidden states where the head is left to the loss."""
        slices: HeadSlices | None = batch.get(HEAD_SLICE_KEY)
        if slices is not None:
            return self._left_head.run(forward, slices)
        logits: torch.Tensor = forward().logits
        return keep_readable(logits) if self._shows_logits() else logits

    def _shows_logits(self) -> bool:
        """Whether forward hooks are given the logits, and may keep them. Engines' hooks do not."""
        givers = (self.model, self.model.get_output_embeddings())
        return not self._is_engines and (
            bool(_global_forward_hooks) or any(giver._forward_hooks for giver in givers if giver is not None)
        )

    def run_by(self, engine: torch.nn.Module) -> None:
        """Have `engine`, which wraps the whole model, run its forwards from now on: it gathers weights before them."""
        self._call, self._is_engines = engine.__call__, True

    def recompute_layers(self, enabled: bool) -> None:
        """Whether layers keep their inputs alone from the next forward on. Errors: ConfigError where they cannot."""
        if enabled and not self.model.training:
            raise ConfigError("transformers recomputes layers in training mode alone: call train(), or plan without")
        for number, layer in self.own_layers.items():
            if not hasattr(layer, "gradient_checkpointing"):
                if enabled:
                    raise ConfigError(f'{type(layer).__name__} cannot be recomputed: plan with recompute="none"')
                return
            layer.gradient_checkpointing = enabled
            layer._gradient_checkpointing_func = partial(self._checkpoint, f"layer {number}")

    def _checkpoint(self, layer: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Recomputation seeds as the forward did: the layer's hooks are outside of `call` or, in older versions,
        within, where they find no key by then."""
        key = self._key

        def run(*arguments: Any) -> Any:
            outer, self._key = self._key, key  # that of whatever runs now, in a backward none
            try:
                self._seed(layer)
                return call(*arguments)
            finally:
                self._key = outer

        return torch.utils.checkpoint.checkpoint(run, *arguments, use_reentrant=False)

    def _seed_before(self, module: torch.nn.Module, name: str) -> None:
        module.register_forward_pre_hook(lambda _module, _inputs: self._seed(name))

    def _seed(self, name: str) -> None:
        if self._key:
            seed_torch(seed_of(self._key, name))


class ModelCut(Protocol):
    """How a family of models is cut into stages."""

    @property
    def changed(self) -> set[str]:
        """The modules in whose places something else may be put, by their names; those of a list as "list.*"."""

    def check(self, model: Any) -> None:
        """Errors: ConfigError where the model cannot be cut so."""

    def places(self, config: Any, topology: Topology, pp_rank: int) -> list[PartPlace]:
        """The stages of a pipeline rank. Errors: ConfigError for those that the family cannot have."""

    def in_place(self, model: Any, place: PartPlace) -> None:
        """Leave a model what its stage needs."""

    def part(self, model: Any, place: PartPlace) -> TransformersPart:
        """Of a model that was cut to its place."""


def cut_out(cut: ModelCut, model: Any, place: PartPlace) -> TransformersPart:
    """A stage's share as a model of its own, with the very layers and weights of `model`, which stays whole."""
    own = with_own_modules(model)
    parents = {tuple(path.split(".")[:depth]) for path in cut.changed for depth in range(1, path.count(".") + 1)}
    for *above, name in sorted(parents, key=len):
        parent = own.get_submodule(".".join(above))
        setattr(parent, name, with_own_modules(getattr(parent, name)))
    cut.in_place(own, place)
    return cut.part(own, place)


def hold_shared_once(parts: Sequence[TransformersPart]) -> None:
    """Make the copies of a weight that stages of one rank hold one: the first stage's, which the others use."""
    owned: dict[str, torch.nn.Parameter] = {}
    for part in parts:
        for name, weight in part.shared.items():
            part.shared[name] = first = owned.setdefault(name, weight)
            for module in part.model.modules() if first is not weight else ():
                for own in [own for own, other in module._parameters.items() if other is weight]:
                    module._parameters[own] = first


def copied_weights(parts: Iterable[TransformersPart]) -> set[torch.nn.Parameter]:
    """The weights of a rank that an earlier stage, of another rank, holds too: it counts them and saves them."""
    parts = list(parts)
    own = {part.place.stage for part in parts}
    return {weight for part in parts for name, weight in part.shared.items() if part.holders[name][0] not in own}

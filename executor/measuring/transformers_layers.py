"""Layers of a model of transformers, measured as transformers computes them: seconds and stored bytes of a family's own
modules, which are not those of megatron-core."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from dynapipe_ext.batch.micro_batches import Layout, MicroBatch, SampleLength
from dynapipe_ext.data.batches import collate
from dynapipe_ext.data.dataset import TokenSample
from dynapipe_ext.data.pairs import PairSample, collate_pairs
from dynapipe_ext.executor.stages.transformers.parts import model_class, parts_of_model
from dynapipe_ext.executor.stages.transformers.quiet import quietly
from dynapipe_ext.executor.stages.transformers.stage import token_loss_sum
from dynapipe_ext.executor.stages.transformers.twin import layers_of_all_kinds, with_layers
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.layer_pattern import LayerPattern
from dynapipe_ext.models.module_tree import meta_model, set_dropout
from dynapipe_ext.settings.tables import LoraSettings


@dataclass(frozen=True)
class TransformersLayers:
    """Of a configuration of transformers: its first layers, as many as have all kinds.

    `options` are those of the run's parts: attn_implementation, without which packed rows are masked as a whole.
    `layouts`: those that the run has. With `adapters` these train, and the model's weights do not.
    """

    config: Any
    architecture: Architecture
    dtype: str
    device: torch.device
    layouts: Sequence[Layout]
    options: Mapping[str, Any]
    dropout: float = 0.0
    pattern: LayerPattern | None = None
    adapters: LoraSettings | None = None

    @property
    def kinds(self) -> list[Architecture]:
        return [self.architecture]  # whose first layers have all of them

    @cached_property
    def _whole(self) -> Any:
        return model_class(self.config, self.pattern)

    @cached_property
    def num_layers(self) -> int:
        if self.architecture.num_decoder_layers:
            return 2
        return max(2, layers_of_all_kinds(meta_model(self._whole, self.config), least=2))

    @property
    def masks_rows(self) -> bool:
        return "packed" in self.layouts and "attn_implementation" not in self.options

    def ready(self) -> AbstractContextManager[None]:
        return nullcontext()

    def model(self, kind: Architecture) -> TransformersModel:
        small = with_layers(self.config, self.num_layers)
        if kind.num_decoder_layers:
            small.num_decoder_layers = self.num_layers
        set_dropout(small, self.dropout)
        with quietly(), torch.random.fork_rng(devices=[]), self.device:
            model = self._whole._from_config(small, dtype=getattr(torch, self.dtype), **self.options)
        (part,) = parts_of_model(model.train(), pattern=self.pattern)
        if self.adapters:
            from dynapipe_ext.executor.stages.transformers.adapters import add_adapters  # needs peft

            add_adapters([part], self.adapters, seed=0)
        return TransformersModel(part, self.device, has_pairs=bool(kind.num_decoder_layers))


@dataclass(frozen=True, slots=True)
class TransformersModel:
    """A whole model in one part."""

    part: Any
    device: torch.device
    has_pairs: bool

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        parameters: Iterable[torch.nn.Parameter] = self.part.parameters()
        return parameters

    def layers(self) -> list[torch.nn.Module]:
        own: dict[int, torch.nn.Module] = self.part.own_layers
        return [own[number] for number in sorted(own)]

    def losses(self, rows: int, length: int, layout: Layout) -> torch.Tensor:
        """Their sum, as a last stage makes it. Of padded rows all but the first end in padding, which a family may mask
        otherwise than whole rows."""
        lengths = [length - (row > 0 and layout == "padded") for row in range(rows)]
        samples = [SampleLength(i, n, n * self.has_pairs, n) for i, n in enumerate(lengths)]
        micro_batch, ids = MicroBatch(tuple(samples), layout), np.ones(length + 1, np.int64)
        if self.has_pairs:
            arrays = collate_pairs(micro_batch, [PairSample(i, ids[:n], ids[:n]) for i, n in enumerate(lengths)])
        else:
            arrays = collate(micro_batch, [TokenSample(i, ids[: n + 1], 1) for i, n in enumerate(lengths)])
        batch: Any = {name: torch.from_numpy(x) for name, x in arrays.items() if isinstance(x, np.ndarray)}
        batch = self.part.checked(batch, micro_batch, "the measured micro-batch")
        batch |= {"model_inputs": self.part.model_inputs(micro_batch), "random_key": "measured"}
        batch = {name: self._moved(value) for name, value in batch.items()}
        total = token_loss_sum(self.part(batch["tokens"], batch=batch), batch)
        assert isinstance(total, torch.Tensor)
        return total

    def _moved(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._moved(one) for name, one in value.items()}
        return value.to(self.device) if isinstance(value, torch.Tensor) else value

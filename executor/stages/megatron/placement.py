"""Stages of a GPT on the ranks of any placement: what Megatron says in its own words for interleaved ones only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.errors import ConfigError


class PlacedLayout(PipelineParallelLayerLayout):  # type: ignore[misc] # megatron has no types
    """Megatron's pipeline layout with stage s on rank `placement[s]`, of which it is the next virtual stage.

    Megatron's own puts stage s on rank s mod pp. Layer numbers are global; ranks may hold unequal numbers of stages.
    """

    def __init__(self, topology: Topology, num_layers: int) -> None:
        layers = topology.with_layers(num_layers).layers_per_stage
        stages = [[LayerType.decoder] * count for count in layers]
        stages[0].insert(0, LayerType.embedding)
        stages[-1].append(LayerType.loss)
        self._topology, self._layers = topology, layers
        self.input_data: Any = stages
        self.pipeline_model_parallel_size = topology.pp
        self.virtual_pipeline_model_parallel_size = max(len(topology.stages_of(rank)) for rank in range(topology.pp))
        self.layout = [[list(stages[stage]) for stage in topology.stages_of(rank)] for rank in range(topology.pp)]
        for held in self.layout:  # Megatron reads as many virtual stages of every rank
            held += [[]] * (self.virtual_pipeline_model_parallel_size - len(held))
        self.flatten_layout = [layer for stage in stages for layer in stage]

    def get_layer_offset(
        self, layer_type: Any = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Decoder layers before a virtual stage of a rank (default: this one)."""
        assert layer_type == LayerType.decoder
        rank = parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank
        return sum(self._layers[: self._topology.stages_of(rank)[vp_stage or 0]])


def virtual_stage(topology: Topology, stage: int, config: Any) -> int | None:
    """Which of its rank's chunks a stage is, as Megatron wants it: None where ranks hold one."""
    if config.virtual_pipeline_model_parallel_size is None:
        return None
    return topology.stages_of(topology.stage_ranks[stage]).index(stage)


def is_tied_by_megatron(topology: Topology) -> bool:
    """Whether Megatron keeps a tied embedding and head equal: in one stage, or as copies on the first and last rank.

    Else one rank holds both ends, and `build_chunks` makes them one weight. Errors: ConfigError where neither is so.
    """
    first, last = topology.stage_ranks[0], topology.stage_ranks[-1]
    num_chunks = {len(topology.stages_of(rank)) for rank in range(topology.pp)}
    if topology.num_stages == 1 or ((first, last) == (0, topology.pp - 1) and len(num_chunks) == 1):
        return True
    if first == last:
        return False
    raise ConfigError(
        f"tied embeddings under placement {topology.stage_ranks}: Megatron sums the gradients of two copies between the"
        " first stage of rank 0 and the last stage of the last rank, of as many stages each: place them so, or both on"
        " one rank, or untie them (tied_embeddings false)"
    )


def build_chunks(
    topology: Topology, pp_rank: int, build: Callable[[int], torch.nn.Module], *, tied_embeddings: bool
) -> list[torch.nn.Module]:
    """What `build(stage)` gives for each stage of a pipeline rank, in their order.

    Where a rank holds both ends of a tied model (a V), the head uses the embedding's weight and has none of its own:
    one parameter, one gradient, one optimizer state, saved once. Stages of an encoder-decoder likewise (`lend_copies`).
    """
    stages = topology.stages_of(pp_rank)
    chunks = [build(stage) for stage in stages]
    if hasattr(chunks[0], "copies"):
        from dynapipe_ext.executor.stages.megatron.t5 import EncoderDecoderPart, lend_copies

        lend_copies([chunk for chunk in chunks if isinstance(chunk, EncoderDecoderPart)])
        return chunks
    if tied_embeddings and not is_tied_by_megatron(topology) and stages[0] == 0:
        head: Any = chunks[-1].output_layer
        embedding: Any = chunks[0].embedding
        del head.weight
        head.__dict__["weight"] = embedding.word_embeddings.weight  # used, not owned: parameters() leaves it out
        chunks[-1].__dict__["sharded_state_dict"] = partial(_state_without_head, chunks[-1])
    return chunks


def _state_without_head(model: Any, *arguments: Any, **options: Any) -> Any:
    """Megatron's sharded state of a model whose head has no weight of its own; Megatron would look for one."""
    model.post_process = False
    try:
        return type(model).sharded_state_dict(model, *arguments, **options)
    finally:
        model.post_process = True

"""A running Megatron model as Hugging Face's tensors, without files: for evaluation, and for the sampler of RL.

    engine = LLM(...)                                             # vLLM, SGLang, transformers: what takes such tensors
    for step in range(num_steps):
        train(chunks)
        engine.load_weights(export_hf_weights(chunks, architecture))     # every rank, between two steps
        rollouts = engine.generate(prompts)

or, on the first rank alone, a model of transformers to evaluate:

    weights = dict(export_hf_weights(chunks, architecture, receivers="first"))   # empty on the others
    if weights:
        model = AutoModelForCausalLM.from_pretrained(None, config=config, state_dict=weights)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.executor.stages.megatron.gather import Receivers, WeightGatherer
from dynapipe_ext.executor.stages.megatron.stage import Chunks, unwrapped
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.tensors import tensor_groups
from dynapipe_ext.tools.checkpoint.megatron.legacy_names import whole_name
from dynapipe_ext.tools.checkpoint.megatron.names import (
    MegatronTensor,
    from_megatron,
    megatron_tensors,
    tied_head_name,
)


def export_hf_weights(
    chunks: Chunks, architecture: Architecture, *, receivers: Receivers = "all"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of every weight as the Hub has them, in the order of the forward pass: the bits that saving and
    converting would give.

    `chunks`: this rank's model chunks, one a stage and in their order, wrapped in DDP or not, of local layers or of
    Transformer Engine's. All ranks run through it together and to its end: it gathers over tensor and pipeline parallel
    ranks as it goes, so that a rank has the tensors of one layer's weight at a time beside its model. With `receivers`
    "first" only the first rank is given tensors. They are copies, on the model's device and in its precision: what
    trains next does not change them. A tied head is the embedding, and not given again; rows that pad the vocabulary
    are left out.

    Errors, before a tensor is gathered and on all ranks: DataError naming every weight that `architecture` has and the
    model has not, or the other way; ConfigError under expert parallelism, and for a model of no published family.
    """
    if isinstance(chunks, torch.nn.Module) or not chunks:
        raise ConfigError(f"chunks is {type(chunks).__name__}: give the list of this rank's model chunks")
    wanted = [(group, megatron_tensors(architecture, group)) for group in tensor_groups(architecture)]
    gatherer = WeightGatherer(_held(chunks), receivers)
    names = _names(architecture, gatherer, [tensor for _, tensors in wanted for tensor in tensors])
    for group, tensors in wanted:
        gathered = {}
        for tensor in tensors:
            whole = gatherer.whole(names[tensor.name], tp_dim=tensor.tp_dim, tp_parts=tensor.tp_parts)
            if whole is not None:
                gathered[tensor.name] = whole[: tensor.shape[0]] if tensor.vocabulary else whole
        if gathered:
            del whole
            converted = from_megatron(architecture, group, gathered)
            gathered.clear()
            while converted:
                name = next(iter(converted))
                yield name, _of_its_own(converted.pop(name))


def _held(chunks: Chunks) -> dict[str, torch.Tensor]:
    """This rank's weights by their names in the whole model, under the local layer specs."""
    weights: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        model: Any = unwrapped(chunk)
        layers = model.decoder.layers
        first_layers = {"decoder": layers[0].layer_number - 1 if len(layers) else 0}
        for name, value in model.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor) and not name.endswith("_extra_state"):
                weights[whole_name(name, first_layers)] = value
    return weights


def _names(architecture: Architecture, gatherer: WeightGatherer, wanted: list[MegatronTensor]) -> Mapping[str, str]:
    """Under which name the model has each weight, which may be an alias. Errors: DataError for what does not fit."""
    names, faults = {}, []
    expected = {tied_head_name(architecture)} if architecture.tied_embeddings else set()
    for tensor in wanted:
        expected |= {tensor.name, *tensor.aliases}
        name = next((name for name in (tensor.name, *tensor.aliases) if name in gatherer.places), None)
        if name is None:
            faults.append(f"no {tensor.name}")
            continue
        names[tensor.name] = name
        shape = gatherer.whole_shape(name, tensor.tp_dim)
        rows_fit = shape[0] >= tensor.shape[0] if tensor.vocabulary else shape[:1] == tensor.shape[:1]
        if not rows_fit or shape[1:] != tensor.shape[1:]:
            faults.append(f"{name} of shape {shape}, not {tensor.shape}")
    faults += [f"{name}, which {architecture.family} has not" for name in gatherer.places if name not in expected]
    if faults:
        shown = "; ".join(faults[:8]) + (f" and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise DataError(f"the model has {shown}: give the architecture that it was built from")
    return names


def _of_its_own(tensor: torch.Tensor) -> torch.Tensor:
    """Not a view of what others share: safetensors refuses such, and one kept would keep all."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()

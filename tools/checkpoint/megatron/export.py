"""A running Megatron model as Hugging Face's tensors, without files: for evaluation, and for the sampler of RL.

    engine = LLM(...)                                             # vLLM, SGLang, transformers: what takes such tensors
    for step in range(num_steps):
        train(chunks)
        for bucket in weight_buckets(export_hf_weights(chunks, architecture), 512 << 20):     # every rank
            engine.update_weights_from_tensor(bucket)
        rollouts = engine.generate(prompts)

or, on the first rank alone, a model of transformers to evaluate:

    weights = dict(export_hf_weights(chunks, architecture, receivers="first"))   # empty on the others
    if weights:
        model = AutoModelForCausalLM.from_pretrained(None, config=config, state_dict=weights)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.stages.megatron.gather import Receivers, WeightGatherer
from dynapipe_ext.executor.stages.megatron.stage import Chunks
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.tensors import tensor_groups
from dynapipe_ext.tools.checkpoint.megatron.live import LiveModel
from dynapipe_ext.tools.checkpoint.megatron.names import from_megatron, megatron_tensors


def export_hf_weights(
    chunks: Chunks, architecture: Architecture, *, receivers: Receivers = "all"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of every weight as the Hub has them, in the order of the forward pass: the bits that saving and
    converting would give.

    `chunks`: this rank's model chunks, one a stage and in their order, wrapped in DDP or not, of local layers or of
    Transformer Engine's. All ranks run through it together and to its end: it gathers over tensor, expert and pipeline
    parallel ranks as it goes, so that a rank has the tensors of one layer's weight at a time beside its model. With
    `receivers` "first" only the first rank is given tensors. They are copies, on the model's device and in its
    precision: what trains next does not change them. A tied head is the embedding, and not given again; rows that pad
    the vocabulary are left out.

    Errors, before a tensor is gathered and on all ranks: DataError naming every weight that `architecture` has and the
    model has not, or the other way (adapters, layers that predict further tokens); ConfigError for a model of no
    published family.
    """
    live = LiveModel.of(chunks, architecture)
    gatherer = WeightGatherer(live.held, live.places, receivers)
    for group in tensor_groups(architecture):
        gathered = {}
        for tensor in megatron_tensors(architecture, group):
            whole = gatherer.whole(
                live.names[tensor.name],
                tp_dim=tensor.tp_dim,
                tp_parts=tensor.tp_parts,
                of_experts=tensor.is_of_experts,
            )
            if whole is not None:
                gathered[tensor.name] = whole[: tensor.shape[0]] if tensor.vocabulary else whole
        if gathered:
            del whole
            converted = from_megatron(architecture, group, gathered)
            gathered.clear()
            while converted:
                name = next(iter(converted))
                yield name, _of_its_own(converted.pop(name))


def weight_buckets(
    weights: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The same weights in lists of at most `bucket_bytes`, in their order: what one update of a sampler takes.

    A larger tensor is a list of its own. Let go of a list before the next one is asked for: then one is in memory.
    """
    if bucket_bytes < 1:
        raise ConfigError(f"bucket_bytes is {bucket_bytes} but must be at least 1: samplers take some 512 MB")
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def _of_its_own(tensor: torch.Tensor) -> torch.Tensor:
    """Not a view of what others share: safetensors refuses such, and one kept would keep all."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()

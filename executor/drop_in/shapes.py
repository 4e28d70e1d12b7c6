"""Makes an unchanged `forward_step` see micro-batches of any shape: by Megatron-LM's arguments, and packed rows by a
hook on the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dynapipe_ext.batch.micro_batches import Layout, MicroBatch
from dynapipe_ext.data.batches import document_lengths
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.stages.carried_keys import CarriedPiece
from dynapipe_ext.executor.stages.megatron.layers import CoreAttention
from dynapipe_ext.executor.stages.megatron.stage import packed_parameters, take_pieces, unwrapped


class MicroBatchShapes:
    """Of one rank's model chunks. `args` are Megatron-LM's, None for scripts that have none.

    While a micro-batch runs, `args.micro_batch_size` and `args.seq_length` are its own: tensor parallel ranks allocate
    by them what the first of them broadcasts. No attention mask is made or broadcast: causal attention is what a GPT's
    layers do without one. A packed row's documents reach every chunk's forward as `packed_seq_params`, whatever the
    script passes; layers of the local specs, whose attention refuses them, get attention that restarts at each, and
    goes on from piece to piece of a cut sample.
    """

    def __init__(self, chunks: Sequence[Any], args: Any, device: torch.device, layout: Layout) -> None:
        self._args, self._device = args, device
        self._packed: Any = None
        self._models = [unwrapped(chunk) for chunk in chunks]
        if layout == "padded":
            return
        for model in self._models:
            _restart_attention(model)
            # Before hooks that read the row: those of `take_pieces` may be there already.
            model.register_forward_pre_hook(self._with_documents, prepend=True, with_kwargs=True)

    @contextmanager
    def of(self, micro_batch: MicroBatch, carried: CarriedPiece | None = None) -> Iterator[None]:
        """Errors: ConfigError for a piece where the model does not attend to earlier ones."""
        if carried is not None:
            for model in self._models:
                take_pieces(model)
        own: dict[str, Any] = {
            "micro_batch_size": micro_batch.rows,
            "seq_length": micro_batch.encoder_len,
            "create_attention_mask_in_dataloader": False,
            "sft": False,  # which from 0.17 on says that data come with borders of documents
        }
        before = {name: getattr(self._args, name) for name in own if hasattr(self._args, name)}
        try:
            for name in before:
                setattr(self._args, name, own[name])
            if micro_batch.layout == "packed":
                self._packed = packed_parameters(document_lengths(micro_batch), self._device, carried)
            yield
        finally:
            self._packed = None
            for name, value in before.items():
                setattr(self._args, name, value)

    def _with_documents(
        self, _model: Any, arguments: Any, keywords: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        if self._packed is None:
            return None
        return arguments, {**keywords, "packed_seq_params": self._packed}


def _restart_attention(model: Any) -> None:
    """Errors: ConfigError for attention that packed rows do not have here: windows, other softmaxes, other kinds."""
    from megatron.core.transformer.attention import Attention, SelfAttention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    for module in model.modules():
        if isinstance(module, Attention) and isinstance(module.core_attention, DotProductAttention):
            kind, fine = type(module).__name__, {"window_size": None, "softmax_type": "vanilla"}
            differing = [
                f"{name} is {value!r}" for name in fine if (value := getattr(module.config, name)) != fine[name]
            ]
            if differing or not isinstance(module, SelfAttention):
                raise ConfigError(
                    f"{(differing or [f'a layer has {kind}'])[0]}, which packed rows do not support with local layers:"
                    " plan padded rows (--dynapipe-layout padded)"
                )
            module.core_attention = CoreAttention(
                module.config, module.layer_number, softmax_scale=module.config.softmax_scale
            )

"""A Stage of a training loop's `forward_step_func`: Megatron's own `forward_step` on each model chunk, by a plan, on
micro-batches of any shape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from dynapipe_ext.batch.micro_batches import MicroBatch
from dynapipe_ext.data.batches import document_lengths
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.drop_in.gradient_sync import StepGradients
from dynapipe_ext.executor.drop_in.placement import as_interleaved
from dynapipe_ext.executor.instructions import ExecutionPlan
from dynapipe_ext.executor.protocols import Batch, Tensors
from dynapipe_ext.executor.stages.carried_keys import CarriedPiece
from dynapipe_ext.executor.stages.chunk_runner import ChunkRunner
from dynapipe_ext.executor.stages.joined_ranks import ALONE, JOINED_KEY, Joined, JoinedRanks
from dynapipe_ext.executor.stages.megatron.core_attention import CoreAttention
from dynapipe_ext.executor.stages.megatron.layers import rotate_without_waiting
from dynapipe_ext.executor.stages.megatron.placed_rows import take_pieces, take_slices
from dynapipe_ext.executor.stages.megatron.stage import packed_parameters, replay_megatron, unwrapped


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStep:
    """One call of a forward-backward function, in Megatron's words.

    `chunks` are the rank's model chunks, `iterators` the data iterator of each. `config` is their TransformerConfig.
    `num_micro_batches` is what the loop counts, of planned data not what is run.
    """

    forward_step_func: Callable[..., Any]
    chunks: Sequence[Any]
    iterators: Sequence[Any]
    config: Any
    num_micro_batches: int
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    force_all_reduce: bool = False
    in_v: bool = False  # two chunks a rank, the second on the way back up

    def is_first(self, number: int) -> bool:
        """Whether the chunk's forward of that number counts as a step's first (`check_first_val_step`)."""
        if self.forward_only and self.first_val_step is not None:
            return self.first_val_step and number == 0
        return number == 0


# (chunk number, micro-batch, its tensors) -> what is given to `next`
BatchIterator = Callable[[int, int, Batch], Any]
Around = Callable[[MicroBatch, CarriedPiece | None, JoinedRanks | None], AbstractContextManager[None]]


class ForwardStepStage:
    """Stage of a rank's model chunks; each micro-batch is one call of the loop's `forward_step_func` a chunk.

    `data(chunk, micro-batch, its tensors)` gives the iterator that the call reads; it runs within `around(micro-batch,
    its piece, the ranks that share its rows)`.
    Losses are not divided: what Megatron divides by (token counts, numbers of micro-batches) is divided by Megatron.
    After the step `reports` has what its loss functions reported, in the order of the plan's micro-batches, on the rank
    of the last stage.
    """

    def __init__(
        self, step: LoopStep, gradients: StepGradients, data: BatchIterator, around: Around, joined: Joined = ALONE
    ) -> None:
        self._step, self._gradients, self._data, self._around = step, gradients, data, around
        self._timers = step.config.timers
        parameters = [parameter for chunk in step.chunks for parameter in chunk.parameters()]
        device = parameters[0].device if parameters else torch.device("cpu")
        self._runner = ChunkRunner(
            [any(parameter.requires_grad for parameter in chunk.parameters()) for chunk in step.chunks],
            gradients,
            parameters=parameters,
            make_splittable=lambda: parameters,
            device=device,
            measure_bytes=False,
            replay=replay_megatron,
            joined=joined,
        )
        self._num_forwards: dict[int, int] = defaultdict(int)
        self._reports: dict[int, list[Any]] = {}
        self._num_tokens: dict[int, torch.Tensor] = {}

    def measure_bytes(self) -> None:
        """Count what forwards keep (`held_bytes`), by hooks that cost some time."""
        self._runner.measure_bytes = True

    @property
    def reports(self) -> list[Any]:
        return [report for _, reports in sorted(self._reports.items()) for report in reports]

    def start_step(self, plan: ExecutionPlan) -> None:
        self._plan = plan
        self._runner.start_step(replace(plan, loss_weight=1))

    def load(self, micro_batch: int, batch: Batch) -> None:
        self._runner.load(micro_batch, batch)

    def forward(self, stage: int, micro_batch: int, inputs: Tensors) -> Tensors:
        outputs = self._runner.forward(stage, micro_batch, inputs, partial(self._call, stage, micro_batch))
        self._num_forwards[stage] += 1
        return outputs

    def backward(self, stage: int, micro_batch: int, output_grads: Tensors) -> Tensors:
        with self._timed("backward-compute"):
            return self._runner.backward(stage, micro_batch, output_grads)

    def backward_input(self, stage: int, micro_batch: int, output_grads: Tensors) -> Tensors:
        with self._timed("backward-compute"):
            return self._runner.backward_input(stage, micro_batch, output_grads)

    def backward_weight(self, stage: int, micro_batch: int) -> None:
        with self._timed("backward-compute"):
            self._runner.backward_weight(stage, micro_batch)

    def finish_step(self) -> float:
        for num_tokens in self._num_tokens.values():
            self._gradients.count_tokens(num_tokens)
        return self._runner.finish_step(_of_this_rank)

    def held_bytes(self) -> int:
        return self._runner.held_bytes()

    def _call(self, stage: int, micro_batch: int, batch: Batch, x: torch.Tensor | None = None) -> torch.Tensor:
        """The chunk's output, or on the last stage the scalar that its backward starts from; once more where the stage
        is recomputed."""
        from megatron.core.pipeline_parallel.schedules import forward_step

        step, number = self._step, self._plan.stages.index(stage)
        is_last = stage == self._plan.num_stages - 1
        reports: list[Any] = []
        own = {name: value for name, value in batch.items() if name not in ("carried", JOINED_KEY)}
        as_built = as_interleaved(number) if step.in_v else nullcontext()
        planned = self._plan.micro_batches[micro_batch]
        with self._around(planned, batch.get("carried"), batch.get(JOINED_KEY)), as_built:
            output, num_tokens = forward_step(
                step.forward_step_func,
                self._data(number, micro_batch, own),
                step.chunks[number],
                len(self._plan.micro_batches),
                x,
                reports,
                step.config,
                cp_group_size=1,
                collect_non_loss_data=step.collect_non_loss_data,
                is_first_microbatch=step.is_first(self._num_forwards[stage]),
                current_microbatch=self._num_forwards[stage],
                vp_stage=number if len(step.chunks) > 1 else None,
                is_last_stage=is_last,
            )
        if not is_last:
            return output  # type: ignore[no-any-return]
        self._reports[micro_batch], self._num_tokens[micro_batch] = reports, num_tokens
        if step.forward_only:
            return torch.zeros(())  # what was collected may be anything
        if step.config.grad_scale_func is not None:
            output = step.config.grad_scale_func(output)
        return output.reshape(()) if output.numel() == 1 else output  # type: ignore[no-any-return]

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        if self._timers is not None:
            self._timers(name, log_level=2).start()
        yield
        if self._timers is not None:
            self._timers(name).stop()


def _of_this_rank(_: torch.Tensor) -> None:
    """Losses of other ranks are gathered by the training loop, from reports."""


class MicroBatchShapes:
    """Of one rank's model chunks. `args` are Megatron-LM's, None for scripts that have none.

    While a micro-batch runs, `args.micro_batch_size` and `args.seq_length` are its own: tensor parallel ranks allocate
    by them what the first of them broadcasts. No attention mask is made or broadcast: causal attention is what a GPT's
    layers do without one. A packed row's documents reach every chunk's forward as `packed_seq_params`, whatever the
    script passes. The attention of local specs refuses these, so such layers get an attention of ours: it restarts at
    each document, and continues over the pieces of a cut sample. They also get it where ranks are joined, under any
    layout.
    """

    def __init__(self, chunks: Sequence[Any], args: Any, device: torch.device, *, restarts_attention: bool) -> None:
        self._args, self._device = args, device
        self._packed: Any = None
        self._models = [unwrapped(chunk) for chunk in chunks]
        if not restarts_attention:
            return
        for model in self._models:
            _restart_attention(model)
            # Before hooks that read the row: those of `take_pieces` may be there already.
            model.register_forward_pre_hook(self._with_documents, prepend=True, with_kwargs=True)

    @contextmanager
    def of(
        self, micro_batch: MicroBatch, carried: CarriedPiece | None = None, joined: JoinedRanks | None = None
    ) -> Iterator[None]:
        """Errors: ConfigError for a piece where the model does not attend to earlier ones, and for joined ranks where
        it does not share rows."""
        for model in self._models:
            take_slices(model, joined)
        own_span = None
        if joined is not None:
            rotate_without_waiting()  # which turns a slice by its own positions
            own_span = joined.span(micro_batch.encoder_len)
        if carried is not None:
            for model in self._models:
                take_pieces(model)
        own: dict[str, Any] = {
            "micro_batch_size": micro_batch.rows,
            "seq_length": micro_batch.encoder_len if own_span is None else len(own_span),
            "create_attention_mask_in_dataloader": False,
            "sft": False,  # which from 0.17 on says that data come with borders of documents
        }
        before = {name: getattr(self._args, name) for name in own if hasattr(self._args, name)}
        try:
            for name in before:
                setattr(self._args, name, own[name])
            if micro_batch.layout == "packed":
                documents = document_lengths(micro_batch)
                self._packed = packed_parameters(documents, self._device, carried, span=own_span)
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

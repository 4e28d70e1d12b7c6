"""Puts the drop-in where Megatron looks for its schedules, and takes it away again."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from dynapipe_ext.batch.micro_batches import Layout, Pieces
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.drop_in.arguments import ScriptSettings, add_arguments
from dynapipe_ext.executor.drop_in.datasets import check_data_at_start, planned_iterators, real_flops
from dynapipe_ext.executor.drop_in.drop_in import ForwardBackward
from dynapipe_ext.executor.drop_in.entry_shapes import ShapeOf
from dynapipe_ext.executor.drop_in.gains import GainLog, log_gains
from dynapipe_ext.executor.drop_in.megatron_lm import parsed_arguments, training_loop
from dynapipe_ext.executor.drop_in.pipeline import MegatronPlacement
from dynapipe_ext.executor.drop_in.placement import as_interleaved, check_placement, placed
from dynapipe_ext.executor.drop_in.planned_data import PlannedSteps
from dynapipe_ext.executor.drop_in.refusals import check_arguments
from dynapipe_ext.executor.drop_in.replaced import replaced
from dynapipe_ext.executor.drop_in.sample_streams import LongSamples
from dynapipe_ext.executor.stages.megatron.layers import ROTATIONS
from dynapipe_ext.executor.stages.megatron.stage import LINEAR
from dynapipe_ext.executor.store.address import StoreAddress, named_store
from dynapipe_ext.visible_text import visible


@contextmanager
def installed(
    *,
    costs: CostModel | str | Path | None = None,
    memory_limit_gb: float | None = None,
    split_backward: bool | None = None,
    data: str | Path | Sequence[str | Path] | None = None,
    valid_data: Sequence[str | Path] | None = None,
    long_samples: LongSamples | None = None,
    tokens_per_batch: int | None = None,
    layout: Layout | None = None,
    placement: MegatronPlacement | None = None,
    pieces: Pieces | None = None,
    width: Literal["auto"] | int | None = None,
    store: str | StoreAddress | None = None,
    store_of: Callable[[str | None], StoreAddress | None] = named_store,
    shape_of: ShapeOf | None = None,
) -> Iterator[None]:
    """Within: Megatron's training loops run planned schedules; on exit all is as before.

    Arguments of this function override those of the command line (--dynapipe-*, which Megatron-LM's parser then knows).
    With a `store` (the address of a Redis-compatible one, with its password) a process of the first rank plans the next
    steps of planned data while ranks train; `store_of` makes an address of what --dynapipe-store says. Under
    `variable_seq_lengths`, `shape_of` gives the rows and length of an item of the loop's data iterator; without it, the
    loop's `forward_step` runs up to the model's call. Settings that cannot go with plans are refused when Megatron-LM
    has parsed its arguments, others at the first step.
    """
    script_settings = ScriptSettings(
        costs=costs,
        memory_limit_gb=memory_limit_gb,
        split_backward=split_backward,
        data=data,
        valid_data=valid_data,
        long_samples=long_samples,
        tokens_per_batch=tokens_per_batch,
        layout=layout,
        placement=placement,
        pieces=pieces,
        width=width,
        store=store,
        store_of=store_of,
        shape_of=shape_of,
    )
    with ExitStack() as patches:
        _keep_what_stages_replace(patches)
        _install(patches, script_settings)
        yield


def _keep_what_stages_replace(patches: ExitStack) -> None:
    """On exit Megatron's own functions are back that stages replace once they are made."""
    for name, function in (*ROTATIONS, LINEAR):
        module = importlib.import_module(name)
        _replace(patches, module, function, getattr(module, function))


def _install(patches: ExitStack, script_settings: ScriptSettings) -> None:
    training = training_loop()  # before all names of what is replaced are looked for
    _install_norm(patches)
    _install_router(patches)
    gains = None if training is None else GainLog()
    install_schedules(patches, lambda: ForwardBackward(script_settings.settings(parsed_arguments()), gains))
    if gains is not None:
        _install_loop(patches, script_settings, training, gains)


def _install_loop(patches: ExitStack, script_settings: ScriptSettings, training: Any, gains: GainLog) -> None:
    """What Megatron-LM's own training loop calls; `training` is its module."""
    _replace(patches, training, "training_log", log_gains(gains, training))
    _install_arguments(patches, script_settings)
    _install_placement(patches, script_settings, training)
    _install_data(patches, script_settings, training)


def install_schedules(patches: ExitStack, make: Callable[[], ForwardBackward]) -> None:
    """`get_forward_backward_func` returns what `make` makes when it is first asked."""
    made: list[ForwardBackward] = []

    def get_forward_backward_func(
        pp_size: int | None = None, vp_size: int | None = None, schedule_pg_collection: Any = None
    ) -> ForwardBackward:
        kind = type(schedule_pg_collection).__name__
        if kind == "MultiModuleProcessGroupCollection":  # all that Megatron asks of it
            raise ConfigError(
                f"schedule_pg_collection is a {kind}, but modules on other ranks than their neighbours have no plan:"
                " train them by Megatron's own schedule"
            )
        if not made:
            made.append(make())
        if pp_size is None and vp_size is None:
            return made[0]
        return made[0].of_sizes(pp_size, vp_size)

    schedules: Any = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    _replace_everywhere(patches, schedules.get_forward_backward_func, get_forward_backward_func)


def _install_norm(patches: ExitStack) -> None:
    """The norm of local layers refuses sequence parallelism, for want of the mark that has its gradients summed."""
    module: Any = importlib.import_module("megatron.core.transformer.torch_norm")
    original = module.WrappedTorchNorm.__new__

    def new(kind: type, config: Any, *others: Any, **keywords: Any) -> Any:
        unsharded = copy.copy(config)
        unsharded.sequence_parallel = False
        norm = original(kind, unsharded, *others, **keywords)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    _replace(patches, module.WrappedTorchNorm, "__new__", staticmethod(new))


def _install_router(patches: ExitStack) -> None:
    """megatron-core 0.16.1's router asks for Transformer Engine's kernel by a name that is undefined without it."""
    module: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None
        patches.callback(delattr, module, "te_general_gemm")


def _install_arguments(patches: ExitStack, script_settings: ScriptSettings) -> None:
    importlib.import_module("megatron.training.initialize")
    module: Any = importlib.import_module("megatron.training.arguments")
    original = module.parse_args

    def parse_args(extra_args_provider: Any = None, *others: Any, **keywords: Any) -> Any:
        def provide(parser: Any) -> Any:
            return add_arguments(parser if extra_args_provider is None else extra_args_provider(parser))

        args = original(provide, *others, **keywords)
        check_arguments(args)
        script_settings.settings(args)  # what is wrong with them is said now, not at the first step
        if (data := script_settings.data_arguments(args)).data:
            check_data_at_start(data, args)
        return args

    _replace_everywhere(patches, original, parse_args)


def _install_placement(patches: ExitStack, script_settings: ScriptSettings, training: Any) -> None:
    def as_placed(provider: Callable[..., Any]) -> Callable[..., Any]:
        args = parsed_arguments()
        if script_settings.value(args, "placement") != "v":
            return provider
        check_placement(args)
        return placed(provider)

    build = training.get_model
    _replace(patches, training, "get_model", lambda provider, *others, **kw: build(as_placed(provider), *others, **kw))
    models: Any = sys.modules.get("megatron.training.models.gpt")
    if models is not None:  # from 0.19 on, where configurations say how models are built
        build_model = models.GPTModelBuilder.build_model
        _replace(patches, models.GPTModelBuilder, "build_model", lambda *own, **kw: as_placed(build_model)(*own, **kw))


def _install_data(patches: ExitStack, script_settings: ScriptSettings, training: Any) -> None:
    build, count = training.build_train_valid_test_data_iterators, training.num_floating_point_operations
    trained: list[PlannedSteps] = []
    lines_shown: set[str] = set()

    def build_train_valid_test_data_iterators(provider: Any) -> Any:
        args = parsed_arguments()
        planned = planned_iterators(
            provider, args, script_settings.data_arguments(args), training, _say_once(lines_shown)
        )
        if planned is None:
            script_settings.check_unplanned(args)
            chunk = getattr(provider, "keywords", {}).get("vp_stage")
            with as_interleaved(chunk) if script_settings.value(args, "placement") == "v" else nullcontext():
                return build(provider)
        # With virtual stages the first chunk's iterator is the one that moves.
        if not trained and planned[0] is not None:
            trained.append(planned[0])
            patches.callback(planned[0].close)
        return tuple(_rerun(steps, training) for steps in planned)

    def num_floating_point_operations(args: Any, batch_size: int, *others: Any, **keywords: Any) -> float:
        if trained:
            return real_flops(count, trained[0], args, batch_size)
        return count(args, batch_size, *others, **keywords)  # type: ignore[no-any-return]

    _replace(patches, training, "build_train_valid_test_data_iterators", build_train_valid_test_data_iterators)
    _replace(patches, training, "num_floating_point_operations", num_floating_point_operations)


def _rerun(steps: Any, training: Any) -> Any:
    """As Megatron-LM's loops read them: a list of several sets."""
    if isinstance(steps, list):
        return [training.RerunDataIterator(one) for one in steps]
    return None if steps is None else training.RerunDataIterator(steps)


def _say_once(lines_shown: set[str]) -> Callable[[str], None]:
    """Prints on the first rank, what was not said before: with virtual stages the data are built for each."""

    def say(text: str) -> None:
        if text not in lines_shown and dist.get_rank() == 0:
            print(visible(f"dynapipe: {text}"), flush=True)
        lines_shown.add(text)

    return say


def _replace_everywhere(patches: ExitStack, original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """In every module that has it by its name, the running script too."""
    name = original.__name__
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is original:
            _replace(patches, module, name, replacement)


def _replace(patches: ExitStack, module: Any, name: str, value: Any) -> None:
    patches.enter_context(replaced(module, **{name: value}))

"""verl's Megatron engine: micro-batches by the planning call, steps by proven plans.

In the file that `actor_rollout_ref.model.external_lib` names, which every worker imports:

    from dynapipe_ext.executor.loops import verl

    verl.plan_always()
"""

from __future__ import annotations

import atexit
import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.drop_in.replaced import replaced
from dynapipe_ext.executor.loops.counts import MicroBatchSamples
from dynapipe_ext.executor.loops.running_model import RunningModel
from dynapipe_ext.megatron import installed


def plan_always(*, mini_batch: int = 0, **settings: Any) -> None:
    """`planned_loop` until the process ends."""
    stack = ExitStack()
    stack.enter_context(planned_loop(mini_batch=mini_batch, **settings))
    atexit.register(stack.close)


@contextmanager
def planned_loop(*, mini_batch: int = 0, **settings: Any) -> Iterator[None]:
    """Within: each replica's rollouts are cut by the planning call, where verl cuts by tokens (`use_dynamic_bsz`).

    Forwards alone (old and reference log probabilities) are cut like the update that follows, by its token cap. Where
    that goes in several mini-batches, `mini_batch` is the number of a replica's rollouts in one. Then the first ratio
    of new to old probabilities is exactly 1. `settings` are those of `dynapipe_ext.megatron.installed`.
    """
    module: Any = importlib.import_module("verl.workers.engine.megatron.transformer_impl")
    tensors: Any = importlib.import_module("verl.utils.tensordict_utils")
    engine_class = module.MegatronEngine
    own_step, own_cut = engine_class.forward_backward_batch, module.prepare_micro_batches
    running: list[_Step] = []

    def forward_backward_batch(engine: Any, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        running.append(_Step(engine, mini_batch if forward_only else 0, forward_only))
        try:
            return own_step(engine, data, loss_function, forward_only)
        finally:
            running.pop()

    def prepare_micro_batches(data: Any, **loop_options: Any) -> Any:
        options = {name: tensors.get_non_tensor_data(data, name, default) for name, default in _OPTIONS.items()}
        if not options["use_dynamic_bsz"]:
            return own_cut(data=data, **loop_options)
        if options["force_group_size"] != 1:
            raise ConfigError(f"force_group_size is {options['force_group_size']}: give 1, groups are not planned")
        groups = running[-1].groups(data, options["sp_size"], loop_options["num_batches_divided_by"] or 1)
        return [tensors.index_select_tensor_dict(data, group) for group in groups], groups

    with ExitStack() as patches:
        patches.enter_context(installed(**settings))
        patches.enter_context(replaced(engine_class, forward_backward_batch=forward_backward_batch))
        patches.enter_context(replaced(module, prepare_micro_batches=prepare_micro_batches))
        yield


_OPTIONS = {"use_dynamic_bsz": True, "force_group_size": 1, "sp_size": 1}  # of a batch, with verl's defaults


@dataclass(frozen=True, slots=True)
class _Step:
    """A call of an engine's `forward_backward_batch`."""

    engine: Any
    mini_batch: int  # rollouts of a replica that an update takes at once; 0 for all
    forward_only: bool

    def groups(self, data: Any, sp_size: int, multiple: int) -> MicroBatchSamples:
        """The rollouts of every micro-batch. Errors: PlanError for a rollout above the token cap, by name."""
        lengths = data["input_ids"].offsets().diff().tolist()
        size = self.mini_batch or len(lengths)
        if len(lengths) % size:
            raise ConfigError(f"mini_batch is {size}, which does not divide the {len(lengths)} rollouts of a replica")
        cap = (self.forward_only and self.engine.engine_config.max_token_len_per_gpu) or data["max_token_len_per_gpu"]
        model = RunningModel.of(self.engine.module)
        micro_batches: MicroBatchSamples = []
        for first in range(0, len(lengths), size):
            groups = model.cut(
                lengths[first : first + size], cap * sp_size, forward_only=self.forward_only, multiple=multiple
            )
            micro_batches += [[first + i for i in group] for group in groups]
        return micro_batches

"""slime's schedule of micro-batches by the planning call.

In a module that the manager of rollouts imports (`--rollout-function-path` names a function of it):

    from dynapipe_ext.executor.loops import slime

    slime.plan_schedules_always()
"""

from __future__ import annotations

import atexit
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from dynapipe_ext import Topology, plan_micro_batches
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.drop_in.replaced import replaced
from dynapipe_ext.executor.loops.counts import MicroBatchSamples, in_count

Schedule = tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]


def plan_schedules_always(**rules: Any) -> None:
    """`planned_schedules` until the process ends."""
    stack = ExitStack()
    stack.enter_context(planned_schedules(**rules))
    atexit.register(stack.close)


@contextmanager
def planned_schedules(*, costs: Any = None, **rules: Any) -> Iterator[None]:
    """Within: slime's `build_dp_schedule` asks the planning call where it cuts by tokens (`--use-dynamic-batch-size`).

    Every replica has as many micro-batches as the others, as slime's step takes them, and none has more than
    `--max-tokens-per-gpu` tokens. Log probabilities run on the same micro-batches as the update. The `costs` are, by
    default, those of the model in `--hf-checkpoint`; `rules` are those of `plan_micro_batches`. The trainer runs them
    by its own schedule, or within `dynapipe_ext.megatron.installed`.
    """
    module: Any = importlib.import_module("slime.utils.dp_schedule")
    own = module.build_dp_schedule

    def build_dp_schedule(
        args: Any,
        train_parallel_config: dict[str, int],
        total_lengths: Sequence[int],
        *,
        global_batch_size: int,
        rollout_indices: Sequence[int],
    ) -> Schedule:
        if not args.use_dynamic_batch_size:
            own_schedule: Schedule = own(
                args,
                train_parallel_config,
                total_lengths,
                global_batch_size=global_batch_size,
                rollout_indices=rollout_indices,
            )
            return own_schedule
        if (cp_size := train_parallel_config["cp_size"]) != 1:
            raise ConfigError(f"cp_size is {cp_size}: micro-batches are planned for context parallelism of 1")
        model = costs or json.loads((Path(args.hf_checkpoint) / "config.json").read_text())
        steps = []
        for samples in _steps(rollout_indices, global_batch_size):
            lengths = [total_lengths[i] for i in samples]
            replicas = _replicas(args, train_parallel_config, lengths, model, rules)
            steps.append([[[samples[i] for i in group] for group in groups] for groups in replicas])
        return _as_schedule(steps, global_batch_size)

    holders = [module, *(sys.modules[name] for name in ("slime.ray.rollout",) if name in sys.modules)]
    with ExitStack() as patches:
        for holder in holders:
            patches.enter_context(replaced(holder, build_dp_schedule=build_dp_schedule))
        yield


def _steps(rollout_indices: Sequence[int], size: int) -> list[list[int]]:
    """The samples of each step of so many rollouts, whose samples stay together; a last part of a step is left out."""
    rollouts: dict[int, list[int]] = {}
    for sample, rollout in enumerate(rollout_indices):
        rollouts.setdefault(rollout, []).append(sample)
    each = list(rollouts.values())
    if len(each) < size:
        raise ConfigError(f"{len(each)} rollouts are fewer than a step's global_batch_size {size}: give that many")
    return [list(chain.from_iterable(each[i : i + size])) for i in range(0, len(each) // size * size, size)]


def _replicas(
    args: Any, config: dict[str, int], lengths: list[int], costs: Any, rules: dict[str, Any]
) -> list[MicroBatchSamples]:
    """The micro-batches of every replica, equally many. Errors: PlanError for a sample above the cap, by name."""
    topology = Topology(tp=args.tensor_model_parallel_size, pp=args.pipeline_model_parallel_size, dp=config["dp_size"])
    planned = plan_micro_batches(
        lengths, topology, costs, **{"max_tokens": args.max_tokens_per_gpu, "replica_counts": "equal", **rules}
    )
    rounds = config["microbatch_group_size_per_vp_stage"] if config["vpp_size"] > 1 else 1
    count = -(-max(planned.num_micro_batches) // rounds) * rounds
    return [in_count([list(group) for group in groups], lengths, count) for groups in planned.micro_batches]


def _as_schedule(steps: list[list[MicroBatchSamples]], global_batch_size: int) -> Schedule:
    """The samples of each replica, and its micro-batches as places among them; micro-batches and rollouts a step."""
    partitions, places = [], []
    for groups in (list(chain.from_iterable(own)) for own in zip(*steps, strict=True)):
        ends = [0]
        for group in groups:
            ends.append(ends[-1] + len(group))
        partitions.append([sample for group in groups for sample in group])
        places.append([list(range(first, end)) for first, end in pairwise(ends)])
    return partitions, places, [len(step[0]) for step in steps], [global_batch_size] * len(steps)

"""What all stages of tensors share: a micro-batch from F to B and from I to W, its random numbers, its loss, and the
plain sum of its gradients."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch.autograd.graph import _engine_run_backward

from dynapipe_ext.batch.micro_batches import HEAD_SLICE, slices_head
from dynapipe_ext.errors import ConfigError, named_collectives
from dynapipe_ext.executor.events import PreferenceFigures
from dynapipe_ext.executor.instructions import BackwardInput, ExecutionPlan
from dynapipe_ext.executor.protocols import Batch, Tensors
from dynapipe_ext.executor.stages.carried_keys import CarriedKeys, CarriedPiece
from dynapipe_ext.executor.stages.joined_ranks import ALONE, JOINED_KEY, Joined, JoinedRanks
from dynapipe_ext.executor.stages.position_losses import NUM_FIGURES, LossOfPairs


class StoredBytes:
    """Counts the bytes that autograd saves, each storage once. Weights do not count: `known_pointers` are those of
    their data. What was changed in place since is refused in the backward, as autograd does without hooks."""

    def __init__(self, *known_pointers: set[int]) -> None:
        self._counted_pointers, self._known_pointers = set[int](), known_pointers
        self.num_bytes = 0

    def pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        for pointers in (self._counted_pointers, *self._known_pointers):  # a loop, as this runs for all that is saved
            if pointer in pointers:
                break
        else:
            self._counted_pointers.add(pointer)
            self.num_bytes += storage.nbytes()
        # An operation's own output would keep the operation, and thereby itself, for ever.
        return tensor.detach(), tensor._version

    def counting(self) -> AbstractContextManager[Any]:
        """Within: everything that autograd saves is counted."""
        hooks: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(self.pack, _unpack)
        return hooks


def _unpack(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that the backward needs was changed in place after the forward"
            f" had saved it: its version is {tensor._version}, not {version}"
        )
    return tensor


Replay = Callable[[], AbstractContextManager[None]]  # within: random numbers as from when it was made


def seed_torch(seed: int) -> None:
    """`torch.manual_seed`, which without CUDA formats its caller's stack each time: a fifth of a small layer's time."""
    on_device = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    (torch.manual_seed if on_device else torch.default_generator.manual_seed)(seed)


def replay_torch(device: torch.device) -> Replay:
    """Of the generators of the CPU and the device, which stand afterwards where they stood before."""
    on_device = device.type == "cuda"
    cpu_state = torch.get_rng_state()
    device_state = torch.cuda.get_rng_state(device) if on_device else None

    @contextmanager
    def replay() -> Iterator[None]:
        with torch.random.fork_rng([device] if on_device else []):
            torch.set_rng_state(cpu_state)
            if device_state is not None:
                torch.cuda.set_rng_state(device_state, device)
            yield

    return replay


def random_key(plan: ExecutionPlan, micro_batch: int, joined: JoinedRanks | None = None) -> str:
    """Seed, step and samples of a micro-batch: its dropout depends neither on schedule, placement nor replica.

    Joined ranks draw for their positions alone, so their masks are those of the step's width.
    """
    samples = [(sample.index, sample.start) for sample in plan.micro_batches[micro_batch].samples]
    of_slice = "" if joined is None else f"/slice {joined.number} of {joined.width}"
    return f"{plan.seed}/{plan.step}/{samples}{of_slice}"


def seed_of(key: str, layer: str) -> int:
    """31 bits for the random numbers of one layer."""
    digest = hashlib.sha256(f"{key}/{layer}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


Sum = Callable[[torch.Tensor], None]  # over ranks, in place
# Weights that another rank has a copy of, each with the sum over the ranks that have one.
Copies = Mapping[torch.nn.Parameter, Sum]
NO_COPIES: Copies = MappingProxyType({})


class GradientAccumulator(Protocol):
    """Sums gradients over micro-batches and replicas. After `reduce` the sums are where the optimizer expects them:
    in `parameter.grad`, in the parameter's dtype, or in Megatron's `main_grad`.

    An accumulator that sums `by_use` takes each gradient of a linear layer by `add_weight`, in whole and in split
    backwards. Without, autograd adds up the uses of a weight within one backward.
    """

    by_use: bool = False

    def begin(self, plan: ExecutionPlan) -> None:
        """Start a step: no gradient is held."""

    def backward(self, outputs: Sequence[torch.Tensor], output_grads: Sequence[torch.Tensor] | None) -> None:
        """Run the backward of `outputs`; where they are a loss, `output_grads` is None.

        By the function that `torch.autograd.backward` calls: what that checks before, in Python and for a seventh of a
        small action's time, the engine checks again.
        """
        grads = map(torch.ones_like, outputs) if output_grads is None else output_grads
        _engine_run_backward(
            tuple(outputs), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True
        )

    def add(self) -> None:
        """Take in what the backward that just ran has produced."""

    def add_weight(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        """Take in a gradient that does not come by autograd; `add` follows."""

    def reduce(self) -> None:
        """Sum over replicas, once a step."""


_MAX_BUCKET = 1 << 24  # values of several weights that are summed over replicas at once


class PlainAccumulator(GradientAccumulator):
    """Floating-point sums in arrival order, left in `parameter.grad`; None where no micro-batch of any replica used the
    weight, as autograd leaves it.

    Gradients of 16-bit weights add up in float32, over micro-batches and replicas, and are rounded once. These sums are
    the 4 bytes of a weight that "megatron" states count as its gradient. Replicas are summed bucket by bucket, so that
    no second copy of all gradients exists.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        sum_over_replicas: Sum | None = None,
        *,
        copies: Copies = NO_COPIES,
    ) -> None:
        self._parameters, self._copies = list(parameters), copies
        self._sum_over_replicas = sum_over_replicas
        self._narrow = dict.fromkeys(p for p in self._parameters if p.element_size() < 4)
        self._sums: dict[torch.Tensor, torch.Tensor] = {}  # of narrow weights

    def begin(self, plan: ExecutionPlan) -> None:
        self._sums.clear()
        for parameter in self._parameters:
            parameter.grad = None

    def add(self) -> None:
        """Autograd has already added into `parameter.grad`, where that is wide enough."""
        for parameter in self._narrow:
            if parameter.grad is not None:
                self.add_weight(parameter, parameter.grad)
                parameter.grad = None

    def add_weight(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        if weight not in self._narrow:
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
        elif weight in self._sums:
            self._sums[weight].add_(gradient)
        else:
            self._sums[weight] = gradient.float()

    def reduce(self) -> None:
        own = {p for p in self._parameters if p in self._sums or p.grad is not None or p in self._copies}
        used = find_used(self._parameters, own, self._sum_over_replicas)
        unsettled: dict[torch.Tensor, torch.Tensor] = {}
        for bucket in _buckets(used):
            sums = [self._take_sum(parameter) for parameter in bucket]
            if self._sum_over_replicas is not None:
                wide = torch.float64 if any(one.dtype == torch.float64 for one in sums) else torch.float32
                flat = torch.cat([one.reshape(-1).to(wide) for one in sums]) if len(sums) > 1 else sums[0].reshape(-1)
                self._sum_over_replicas(flat)
                sums = list(torch.split(flat, [one.numel() for one in sums]))
            for parameter, total in zip(bucket, sums, strict=True):
                if parameter in self._copies:
                    unsettled[parameter] = total
                else:
                    parameter.grad = total.view_as(parameter).to(parameter.dtype)
        for parameter, over_copies in self._copies.items():
            over_copies(unsettled[parameter])
            parameter.grad = unsettled[parameter].view_as(parameter).to(parameter.dtype)

    def _take_sum(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """This rank's sum, which is not kept any longer; zeros where only other ranks used the weight."""
        total = self._sums.pop(parameter, parameter.grad)
        parameter.grad = None
        if total is None:
            total = torch.zeros_like(parameter, dtype=torch.float32 if parameter in self._narrow else None)
        return total.contiguous()


def find_used(
    parameters: Sequence[torch.nn.Parameter], own: Collection[torch.Tensor], sum_over_replicas: Sum | None
) -> list[torch.nn.Parameter]:
    """Return the weights that any replica has a gradient of, where `own` are those of this one."""
    if sum_over_replicas is None or not parameters:
        return [parameter for parameter in parameters if parameter in own]
    counts = torch.tensor([float(parameter in own) for parameter in parameters], device=parameters[0].device)
    sum_over_replicas(counts)
    return [parameter for parameter, count in zip(parameters, counts.tolist(), strict=True) if count]


def _buckets(parameters: Iterable[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Group weights in their order; a weight above the bound has a bucket of its own."""
    bucket, room = list[torch.nn.Parameter](), _MAX_BUCKET
    for parameter in parameters:
        room -= parameter.numel()
        if bucket and room < 0:
            yield bucket
            bucket, room = [], _MAX_BUCKET - parameter.numel()
        bucket.append(parameter)
    if bucket:
        yield bucket


def gradient_of(weight: torch.Tensor) -> torch.Tensor:
    """Return the sum that an accumulator of any kind left; zeros for a weight that no micro-batch used."""
    gradient = getattr(weight, "main_grad", None)
    gradient = weight.grad if gradient is None else gradient
    return torch.zeros_like(weight, requires_grad=False) if gradient is None else gradient


def sum_over_copies(copies: Copies) -> None:
    for weight, over_copies in copies.items():
        over_copies(gradient_of(weight))


# (weight, input, output gradient), two-dimensional
DeferredWork = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

_QUEUE = "dynapipe_deferred"  # attribute of a weight: where its gradients go while they are put off


class DeferredGradients:
    """The weight gradients that one micro-batch's I has put off. One for each stage; holds work only between I and W.

    `accumulate(weight, gradient)` adds a finished gradient where the optimizer expects it. With `takes_all` it is given
    those of whole backwards too, as each of them is found, and autograd none. Only within `deferring` and `taking` are
    gradients taken: a backward that is not a stage's goes by autograd, also after a step that failed.
    """

    def __init__(
        self,
        weights: Iterable[torch.Tensor],
        accumulate: Callable[[torch.Tensor, torch.Tensor], None],
        *,
        takes_all: bool = False,
    ) -> None:
        self._weights, self._accumulate, self.takes_all = list(weights), accumulate, takes_all
        self._work: DeferredWork | None = None
        self._is_taking = False

    def take_over(self) -> None:
        """Have the weights hand over here from now on, and no longer to another stage's."""
        for weight in self._weights:
            setattr(weight, _QUEUE, self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # weights that are saved have no queue

    @contextmanager
    def deferring(self) -> Iterator[DeferredWork]:
        """Within: weight gradients of linear layers are put off, into the list that this yields."""
        work: DeferredWork = []
        self._work = work
        try:
            yield work
        finally:
            self._work = None

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Within: gradients of whole backwards come here, if all are taken."""
        self._is_taking = self.takes_all
        try:
            yield
        finally:
            self._is_taking = False

    @property
    def takes(self) -> bool:
        """Whether gradients come here just now, and not to autograd."""
        return self._is_taking or self._work is not None

    def take(self, weight: torch.Tensor, inputs: torch.Tensor, output_grads: torch.Tensor) -> None:
        """A gradient by its two factors, multiplied now or in W."""
        work = [(weight, inputs.detach(), output_grads.detach())]
        if self._work is None:
            self.run(work)
        else:
            self._work += work

    def take_whole(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        """A gradient as it is."""
        self._accumulate(weight, gradient)

    def run(self, work: DeferredWork) -> None:
        """Compute a micro-batch's gradients in the order in which its backward came to them, freeing as it goes."""
        work.reverse()
        with torch.no_grad():
            while work:
                weight, inputs, output_grads = work.pop()
                self._accumulate(weight, output_grads.t().matmul(inputs).to(weight.dtype))


def deferred_of(weight: torch.Tensor) -> DeferredGradients | None:
    """Where this weight's gradient goes just now: None means to autograd, as usual."""
    queue: DeferredGradients | None = getattr(weight, _QUEUE, None)
    return queue if queue is not None and queue.takes else None


def deferred_bytes(work: DeferredWork) -> int:
    """What the put-off work of a micro-batch holds; storages that several layers share count once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor for _, *pair in work for tensor in pair}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


HEAD_SLICE_KEY = "head_slices"  # of a batch


class HeadSlices:
    """The order to compute a head and its loss in slices of positions. It knows whether a stage has taken it.

    `is_planned`: the plan relies on slices. Without, slices only serve exact sums: a head that cannot be sliced is then
    computed whole in every plan, so all plans still have the same bits.
    """

    def __init__(self, *, is_planned: bool = True) -> None:
        self.is_planned, self.is_taken = is_planned, False

    def take(self) -> int:
        """Positions of a slice."""
        self.is_taken = True
        return HEAD_SLICE


Outputs = tuple[torch.Tensor, ...]


@dataclass(slots=True)
class _Live:
    """One micro-batch between a stage's forward and its backward; `outputs` runs the forward again where that is
    recomputed as a whole."""

    inputs: tuple[torch.Tensor, ...]
    outputs: Outputs | Callable[[CarriedPiece | None], Outputs]
    stored_bytes: int | None = None  # where they were counted

    @property
    def num_bytes(self) -> int:
        if self.stored_bytes is not None:
            return self.stored_bytes
        outputs = self.outputs if isinstance(self.outputs, tuple) else ()
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.inputs, *outputs))


_NOTHING: AbstractContextManager[None] = nullcontext()


class ChunkRunner:
    """Model chunks, one a stage of this rank; `trains` says of each whether weights of it do.

    `make_splittable()` has linear layers hand over their weight gradients, and returns those weights, of which W
    computes the gradients. It is called once: before the first plan with split backwards, or at once where `gradients`
    sums by use. With `measure_bytes`, saved-tensor hooks count what autograd stores beside `parameters`; without, only
    inputs and outputs count. `replay` is of all generators that chunks draw from. `joined` are the ranks with which
    plans may join this one, by width; then `joined_now` are those of the step, None of a step of single ranks.
    """

    def __init__(
        self,
        trains: Sequence[bool],
        gradients: GradientAccumulator,
        *,
        parameters: Iterable[torch.Tensor],
        make_splittable: Callable[[], Iterable[torch.Tensor]],
        device: torch.device,
        measure_bytes: bool,
        replay: Callable[[torch.device], Replay] = replay_torch,
        joined: Joined = ALONE,
    ) -> None:
        self._joined = joined
        self.joined_now: JoinedRanks | None = None
        self._trains, self._gradients, self._device, self._replay = trains, gradients, device, replay
        self._make_splittable = make_splittable
        self._deferred = self._made_splittable() if gradients.by_use else None
        own = list(parameters)
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in own}
        self.preferences: PreferenceFigures | None = None  # of the last step, where its loss is of pairs
        self._only_infers = any(parameter.is_inference() for parameter in own)
        self.measure_bytes = measure_bytes

    def _made_splittable(self) -> DeferredGradients:
        weights, gradients = self._make_splittable(), self._gradients
        return DeferredGradients(weights, gradients.add_weight, takes_all=gradients.by_use)

    def start_step(self, plan: ExecutionPlan) -> None:
        """Errors: ConfigError where the plan gives this rank another number of stages than it has chunks, joins it with
        ranks that it has no communicator with, and where torch's inference mode forbids what the plan learns."""
        if len(plan.stages) != len(self._trains):
            raise ConfigError(
                f"pipeline rank {plan.pp_rank} runs stages {plan.stages} of the plan but was given {len(self._trains)}"
                f" model chunks: give one a stage, in that order (Topology.stages_of({plan.pp_rank}))"
            )
        if not plan.forward_only and (self._only_infers or torch.is_inference_mode_enabled()):
            raise ConfigError(
                f"step {plan.step} has backwards, but torch.inference_mode() was on where weights were made or the step"
                " is executed: leave it, or plan forwards alone (planner.for_forwards())"
            )
        self._plan, self._first_stage, self._last_stage = plan, plan.stages[0], plan.num_stages - 1
        self._head_slices = self._planned_slices()
        self.joined_now = self._ranks_of(plan)
        self._losses: dict[int, torch.Tensor] = {}
        self._figures: dict[int, torch.Tensor] = {}  # of LossOfPairs
        self._batches: dict[int, Batch] = {}
        self._live: dict[tuple[int, int], _Live] = {}
        self._put_off: dict[tuple[int, int], DeferredWork] = {}
        has_pieces = any(micro_batch.attention == "carried" for micro_batch in plan.micro_batches)
        self._carried = CarriedKeys(plan) if has_pieces else None
        if self._deferred is None and BackwardInput in map(type, plan.instructions):
            self._deferred = self._made_splittable()
        if self._deferred is not None:
            self._deferred.take_over()
        if not plan.forward_only:
            self._gradients.begin(plan)

    def _acting(self, action: str) -> AbstractContextManager[None]:
        """Within: what collectives raise says in which action."""
        return named_collectives(action) if self.joined_now is None else self.joined_now.acting(action)

    def _ranks_of(self, plan: ExecutionPlan) -> JoinedRanks | None:
        if plan.width == 1:
            return None
        if plan.width not in self._joined:
            widths = ", ".join(map(str, sorted({1, *self._joined})))
            raise ConfigError(
                f"step {plan.step} joins {plan.width} data parallel ranks (width) but this stage was made for width"
                f" {widths}: give it joined=join_ranks(topology, rank, widths, …) if it is of megatron-core or"
                " transformers, else plan with width 1"
            )
        return self._joined[plan.width]

    def load(self, micro_batch: int, batch: Batch) -> None:
        """Take a micro-batch's tensors, moved to the device; pinned ones are not waited for. Joined ranks are given
        whole rows and take their slices."""
        if self.joined_now is not None:
            batch = self.joined_now.slice_of(batch)
        self._batches[micro_batch] = {
            name: value.to(self._device, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }

    def forward(self, stage: int, micro_batch: int, inputs: Tensors, call: Callable[..., Any]) -> Tensors:
        """Outputs of `call(batch, *inputs)`: a tensor or a tuple of them; on the last stage it returns the loss sum.

        A batch that has a piece of a cut sample says so by "carried", a CarriedPiece. Where the plan recomputes the
        stage, its backward calls again.
        """
        plan = self._plan
        is_last, learns = stage == self._last_stage, not plan.forward_only
        comes_again = learns and plan.micro_batches[micro_batch].layer_recompute == "stage"
        keeps_graph = learns and not comes_again
        own_inputs = tuple(x.detach().requires_grad_(learns) for x in inputs)
        run = partial(self._outputs, stage, micro_batch, own_inputs, call)
        replay = self._replay(self._device) if comes_again else nullcontext
        carried = self._carried
        stored = StoredBytes(self._weights, carried.storages if carried else set()) if self.measure_bytes else None
        with (
            carried.forward(stage, micro_batch) if carried else _NOTHING as piece,
            self._acting(f"step {plan.step}, {stage}F{micro_batch}"),
            _NOTHING if torch.is_grad_enabled() is keeps_graph else torch.set_grad_enabled(keeps_graph),
            stored.counting() if stored else _NOTHING,
        ):
            outputs = run(piece)
        if is_last:
            self._losses[micro_batch] = outputs[0].detach()
        if comes_again:
            self._live[stage, micro_batch] = _Live(own_inputs, partial(_replayed, replay, run))
        elif learns:
            self._live[stage, micro_batch] = _Live(own_inputs, outputs, stored.num_bytes if stored else None)
        elif stage == plan.stages[-1]:
            del self._batches[micro_batch]
        return () if is_last else tuple(x.detach() for x in outputs)

    def _outputs(
        self, stage: int, micro_batch: int, inputs: Outputs, call: Callable[..., Any], piece: CarriedPiece | None
    ) -> Outputs:
        """Errors: ConfigError for what cannot be learned from, where gradients are enabled."""
        batch, is_last = dict(self._batches[micro_batch]), stage == self._last_stage
        slices: HeadSlices | None = None
        if piece is not None:
            batch["carried"] = piece
        if self.joined_now is not None:
            batch[JOINED_KEY] = self.joined_now
        if (is_planned := self._head_slices.get(micro_batch)) is not None:  # stages before the last may hold parts
            slices = batch[HEAD_SLICE_KEY] = HeadSlices(is_planned=is_planned)
        output = call(batch, *inputs)
        if is_last:
            self._check_slices(micro_batch, slices)
            if isinstance(output, LossOfPairs):
                self._figures[micro_batch], output = output.figures, output.total
            output = checked_loss_sum(output) / self._plan.loss_divisor
        outputs = output if isinstance(output, tuple) else (output,)
        if other := [type(x).__name__ for x in outputs if not isinstance(x, torch.Tensor)]:
            raise ConfigError(
                f"what stage {stage} returns has {other[0]} in it but goes to the next stage in a message: return a"
                " tensor, or a tuple of tensors"
            )
        learns = torch.is_grad_enabled() and (inputs or is_last or self._trains[self._plan.stages.index(stage)])
        if learns and not any(x.requires_grad for x in outputs):
            raise ConfigError(
                f"what stage {stage} returns has no gradient: it was detached, or computed under no_grad, on its way"
                " from the stage's inputs and weights"
            )
        return outputs

    def _planned_slices(self) -> dict[int, bool]:
        """For each micro-batch whose head is in slices, whether the plan relies on that. Where sums are exact, every
        plan computes its head in slices, so that no plan's choice shows in the bits."""
        numbered = enumerate(self._plan.micro_batches)
        sliced = {number: slices_head(m.recompute) for number, m in numbered if m.head_positions > HEAD_SLICE}
        return sliced if self._gradients.by_use else {number: True for number, is_asked in sliced.items() if is_asked}

    def _check_slices(self, micro_batch: int, slices: HeadSlices | None) -> None:
        """Errors: ConfigError where the plan relies on slices that nobody made."""
        planned = self._plan.micro_batches[micro_batch]
        if slices is not None and slices.is_planned and not slices.is_taken:
            raise ConfigError(
                f"micro-batch {micro_batch} of step {self._plan.step} is planned with its head in slices (recompute"
                f" {planned.recompute!r}) but the last stage made whole logits of {planned.head_positions} positions:"
                " let the loss call head_loss_sum (dynapipe_ext.executor.stages.sliced_head) on hidden states, or plan"
                f" with recompute={planned.layer_recompute!r}"
            )

    def backward(self, stage: int, micro_batch: int, output_grads: Tensors) -> Tensors:
        plan = self._plan
        with (
            self._carried.backward(stage, micro_batch) if self._carried else _NOTHING as piece,
            self._acting(f"step {plan.step}, backward of micro-batch {micro_batch} on stage {stage}"),
            self._deferred.taking() if self._deferred else _NOTHING,
        ):
            live = self._live.pop((stage, micro_batch))
            outputs = live.outputs if isinstance(live.outputs, tuple) else live.outputs(piece)
            ends = [i for i, x in enumerate(outputs) if x.requires_grad]  # none where the first stage is frozen
            if ends:
                self._gradients.backward(
                    [outputs[i] for i in ends], [output_grads[i] for i in ends] if output_grads else None
                )
        self._gradients.add()
        if stage == self._first_stage:
            del self._batches[micro_batch]
        return tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in live.inputs)

    def backward_input(self, stage: int, micro_batch: int, output_grads: Tensors) -> Tensors:
        """Where layers or stages are recomputed, I does the work of W: else what it recomputed would stay until W."""
        assert self._deferred is not None, "start_step makes it for plans with split backwards"
        if self._plan.micro_batches[micro_batch].adds_weights_in_input_backward:
            self._put_off[stage, micro_batch] = []
            return self.backward(stage, micro_batch, output_grads)
        with self._deferred.deferring() as work:
            input_grads = self.backward(stage, micro_batch, output_grads)
        self._put_off[stage, micro_batch] = work
        return input_grads

    def backward_weight(self, stage: int, micro_batch: int) -> None:
        assert self._deferred is not None
        self._deferred.run(self._put_off.pop((stage, micro_batch)))
        self._gradients.add()

    def finish_step(self, sum_over_job: Callable[[torch.Tensor], None]) -> float:
        """Reduces gradients, and returns the loss of the global batch: `sum_over_job` adds up the ranks' in place.

        The sum of the micro-batches' losses is that of real numbers, rounded once: their order is in no bit of it.
        """
        plan = self._plan
        with named_collectives(f"step {plan.step}, reduction of gradients and loss"):
            if not plan.forward_only:
                self._gradients.reduce()
            shape = (1 + NUM_FIGURES, plan.width, sum(plan.num_micro_batches))
            sums = torch.zeros(shape, dtype=torch.float64, device=self._device)
            own = sums[:, 0 if self.joined_now is None else self.joined_now.number]
            first = sum(plan.num_micro_batches[: plan.dp_rank])
            for micro_batch, loss in self._losses.items():
                own[0, first + micro_batch] = loss
            for micro_batch, figures in self._figures.items():
                own[1:, first + micro_batch] = figures
            sum_over_job(sums)
        loss_sum, num_pairs, *figure_sums = map(_exact_sum, sums.flatten(1).tolist())
        self.preferences = PreferenceFigures.of_sums(num_pairs, *figure_sums) if num_pairs else None
        return loss_sum

    def losses(self) -> dict[int, float]:
        """Micro-batch -> its share of the step's loss; empty where the last stage does not run."""
        if not self._losses:
            return {}
        return dict(zip(self._losses, torch.stack(list(self._losses.values())).tolist(), strict=True))

    def held_bytes(self) -> int:
        put_off = sum(deferred_bytes(work) for work in self._put_off.values())
        carried = self._carried.num_bytes() if self._carried else 0
        return put_off + sum(live.num_bytes for live in self._live.values()) + carried


def _exact_sum(numbers: Sequence[float]) -> float:
    """That of real numbers, rounded once; of some that are not finite, what plain addition makes of them."""
    total = sum(numbers)
    return math.fsum(numbers) if math.isfinite(total) else total


def _replayed(replay: Replay, run: Callable[[CarriedPiece | None], Outputs], piece: CarriedPiece | None) -> Outputs:
    with torch.enable_grad(), replay():
        return run(piece)


def checked_loss_sum(loss: Any) -> torch.Tensor:
    """`loss`, if it is what a last stage returns; else a ConfigError that says what that is."""
    if isinstance(loss, torch.Tensor) and loss.dim() == 0:
        return loss
    kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise ConfigError(
        f"the last stage's loss is {kind} but must be a scalar tensor, the weighted sum over the micro-batch's"
        ' positions: return (losses * batch["loss_weights"]).sum()'
    )

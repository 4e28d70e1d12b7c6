"""The log probabilities that a run's first model gives the answers of its pairs: computed once, kept beside runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from dynapipe_ext.data.dataset import TokenDataset
from dynapipe_ext.data.references import ReferencedPairs, References
from dynapipe_ext.data.sample_selection import SampleSubset
from dynapipe_ext.durable_files import file_stamp, replacing
from dynapipe_ext.errors import NO_ARRAY, ExecutionError, NotFiniteError, named_collectives
from dynapipe_ext.evaluating import evaluating
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.loader import DynaPipeDataLoader
from dynapipe_ext.executor.stages.preference_loss import PreferenceLoss
from dynapipe_ext.launch.job.configured import topology_of
from dynapipe_ext.launch.job.run_directory import runs_folder
from dynapipe_ext.launch.processes.cluster import say_at_once
from dynapipe_ext.launch.rank.built_model import BuiltModel
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.tools.console import counted
from dynapipe_ext.tools.files import writing_in

_FORMAT = 1  # raise it with every change of what the figures mean
_NAME = "log probabilities of the reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePass:
    """Forwards of a model that was just built, and has not been trained nor restored; adapters still add nothing.

    All ranks make and call theirs alike. `load(data, planner, ...)` makes a loader of this rank.
    """

    config: TrainConfig
    architecture: Architecture
    built: BuiltModel
    loss: PreferenceLoss
    load: Callable[..., DynaPipeDataLoader]
    planner: Planner
    executor: PipelineExecutor
    rank: int
    device: torch.device

    def of(self, data: TokenDataset | SampleSubset) -> ReferencedPairs:
        """The pairs with their references: those of an earlier run of equal first weights and data, else computed.

        Errors: NotFiniteError for a pair to which the model gives no finite log probability.
        """
        place = _folder(self.config) / f"{_key(self.config, self.architecture, data)}.npy"
        references = self._stored_references(place, len(data))
        if references is None:
            if self.rank == 0:
                say_at_once(f"references: log probabilities of {counted(len(data), 'pair')} by the first model")
            references = self._computed(data)
            if self.rank == 0:
                _write(place, references)
        return ReferencedPairs(data, references)

    def _stored_references(self, place: Path, num_pairs: int) -> References | None:
        """The references that an earlier run has stored on rank 0's machine, on every rank; None if there are none."""
        shape = (num_pairs, 2)
        own_values = _read_array(place, shape) if self.rank == 0 else None
        has_values = torch.tensor([own_values is not None], dtype=torch.int64, device=self.device)
        with named_collectives(_NAME):
            dist.broadcast(has_values, src=0)
            if not has_values:
                return None
            values = torch.zeros(shape, dtype=torch.float64, device=self.device)
            if own_values is not None:
                values.copy_(torch.from_numpy(own_values))
            dist.broadcast(values, src=0)
        return values.cpu().numpy()

    def _computed(self, data: TokenDataset | SampleSubset) -> References:
        topology, config = topology_of(self.config), self.config
        # A pair alone in its micro-batch has the same bits under every plan.
        alone = (
            {"batch_size": topology.num_replicas, "tokens_per_batch": None} if config.optimizer.deterministic else {}
        )
        with (
            evaluating(*self.built.modules),
            self.load(data, self.planner.for_forwards(), **alone) as loader,
            self.loss.recording() as recorded,
        ):
            for micro_batches, plan in loader:
                self.executor.execute(plan, micro_batches)
        sums = torch.zeros((len(data), 3), dtype=torch.float64, device=self.device)
        if topology.coordinates(self.rank).tp_rank == 0:  # the others of its stage have the same
            for pair, log_probabilities in recorded.items():
                sums[pair, :2] = log_probabilities
                sums[pair, 2] = 1
        with named_collectives(_NAME):
            dist.all_reduce(sums)
        *columns, times = sums.cpu().numpy().T
        return _checked(np.stack(columns, axis=1), times)


def _checked(references: References, times: np.ndarray[tuple[int], np.dtype[np.float64]]) -> References:
    """The references, each of which came as often as `times` says. Errors: see `ReferencePass.of`."""
    if (times != 1).any():
        pair = int(np.flatnonzero(times != 1)[0])
        raise ExecutionError(f"the forwards of pair {pair} ran {times[pair]:.0f} times but should run once: report it")
    if not np.isfinite(references).all():
        pair = int(np.flatnonzero(~np.isfinite(references).all(axis=1))[0])
        raise NotFiniteError(
            f"the first model gives the answers of pair {pair} the log probabilities {references[pair].tolist()}: look"
            " at its weights, and at this pair"
        )
    return references


def _folder(config: TrainConfig) -> Path:
    return runs_folder(config.run.run_dir) / "references"


def _key(config: TrainConfig, architecture: Architecture, data: TokenDataset | SampleSubset) -> str:
    """The same for the same first weights, in the same precision, and the same samples."""
    model = config.model
    weights = files_of(Path(model.init_from)) if model.init_from else ["drawn", config.run.seed]
    samples = data.samples_fingerprint or [data.whole.fingerprint, data.indices.tolist()]
    backend = "transformers" if model.uses_transformers else "megatron"
    made_of = [_FORMAT, architecture.to_json(), model.dtype, backend, weights, samples]
    return hashlib.sha256(json.dumps(made_of, sort_keys=True, default=str).encode()).hexdigest()[:32]


def files_of(place: Path) -> list[list[object]]:
    """Path and `file_stamp` of a file, or of all files below a folder."""
    files = sorted(path for path in place.rglob("*") if path.is_file()) if place.is_dir() else [place]
    return [[str(path.resolve()), *file_stamp(path)] for path in files]


def _read_array(place: Path, shape: tuple[int, int]) -> References | None:
    """The array in a file; None if there is no such file, or no array of this shape in it."""
    try:
        array = np.load(place, allow_pickle=False)
    except NO_ARRAY:
        return None
    fits = isinstance(array, np.ndarray) and array.shape == shape and array.dtype == np.float64
    return array if fits and np.isfinite(array).all() else None


def _write(place: Path, references: References) -> None:
    """In one step: readers see the whole file or none."""
    with writing_in(place), replacing(place) as file:
        np.save(file, references, allow_pickle=False)

"""A part of a dataset that training never sees, drawn by a seed: both parts are datasets with numbers of their own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import LengthArray
from dynapipe_ext.data.batches import permutation
from dynapipe_ext.data.dataset import TokenDataset, TokenSample
from dynapipe_ext.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class SampleSubset:
    """The samples of `whole` that `indices` name, numbered from 0; `lengths` are theirs."""

    whole: TokenDataset
    indices: npt.NDArray[np.int64]
    lengths: LengthArray

    @classmethod
    def of(cls, whole: TokenDataset, indices: npt.NDArray[np.int64]) -> SampleSubset:
        return cls(whole, indices, whole.lengths[indices])

    @property
    def samples_fingerprint(self) -> str | None:
        """sha256 of the whole data's, and of which samples of them these are; None where that is not known."""
        if (whole := self.whole.samples_fingerprint) is None:
            return None
        return hashlib.sha256(whole.encode() + np.ascontiguousarray(self.indices, "<i8").tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> TokenSample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside of the {len(self)} chosen ones of {self.whole.directory}")
        return replace(self.whole[int(self.indices[index])], index=int(index))


def hold_out(whole: TokenDataset, fraction: float, *, seed: int) -> tuple[SampleSubset, SampleSubset]:
    """(what to train on, what is held out): the latter is the given fraction of the samples, rounded, drawn by `seed`.

    Both keep the order of the data. Errors: ConfigError where one of them would be empty.
    """
    num_samples = len(whole)
    num_held = round(fraction * num_samples)
    if not 0 < num_held < num_samples:
        raise ConfigError(
            f"a fraction of {fraction:g} of {num_samples} samples holds out {num_held}, but must leave at least one on"
            " each side: change it, or evaluate on data of their own"
        )
    order = permutation(num_samples, seed=seed, epoch=0)
    held, trained = np.sort(order[:num_held]), np.sort(order[num_held:])
    return SampleSubset.of(whole, trained), SampleSubset.of(whole, held)

"""Pairs of answers with what a reference model gives them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import LengthArray
from dynapipe_ext.data.dataset import TokenDataset, TokenSample
from dynapipe_ext.data.sample_selection import SampleSubset

References = npt.NDArray[np.float64]  # (num_samples, 2): log probabilities of the chosen and of the rejected answers


@dataclass(frozen=True, slots=True, eq=False)
class ReferencedPairs:
    """`data` whose samples have their `references`."""

    data: TokenDataset | SampleSubset
    references: References

    @property
    def lengths(self) -> LengthArray:
        return self.data.lengths

    @property
    def samples_fingerprint(self) -> str | None:
        return self.data.samples_fingerprint

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> TokenSample:
        chosen, rejected = self.references[index].tolist()
        return replace(self.data[index], references=(chosen, rejected))

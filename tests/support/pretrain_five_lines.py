"""A user's training script with the five lines of .github/docs/megatron-lm.md: data of its own, which plans then cut.

Run where Megatron-LM is first on the path; its samples are those of pretrain_padded.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.training import get_args

import dynapipe_ext.megatron as dynapipe
from dynapipe_ext.executor.drop_in.samples import LabelledSample, SampleSource, open_samples, split_source
from tests.support import pretrain_padded


@dataclass
class Samples:
    """Samples as a script may have them: mappings of lists, and their lengths."""

    source: SampleSource

    @property
    def lengths(self) -> Any:
        return self.source.lengths

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = LabelledSample.of(self.source[index])
        return {name: getattr(sample, name).tolist() for name in ("tokens", "labels", "loss_mask")}


def provide(_num_samples: Any) -> list[Samples | None]:
    args = get_args()
    source = open_samples(args.padded_data)
    return [part and Samples(part) for part in split_source(source, args.split)]


if __name__ == "__main__":
    with dynapipe.installed(split_backward=True, memory_limit_gb=1):
        pretrain_padded.pretrain_with(dynapipe.datasets_provider(provide))

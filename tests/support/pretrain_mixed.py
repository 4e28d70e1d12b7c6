"""Megatron-LM's pretrain_gpt.py on a mixture of planned data as it knows them: rows padded to --seq-length, in order.

Run where Megatron-LM is first on the path.
"""

from __future__ import annotations

from typing import Any

from megatron.training import get_args

from dynapipe_ext.executor.drop_in.sample_streams import end_to_end, mixture, of_bounded_length, parse_mixture
from dynapipe_ext.executor.drop_in.samples import SampleSource, open_samples
from tests.support import pretrain_padded
from tests.support.pretrain_padded import Padded


def add_data(parser: Any) -> Any:
    parser.add_argument("--mixed-data", nargs="+")
    parser.add_argument("--mixed-valid-data")
    return parser


class InOrder(Padded):
    def __init__(self, source: SampleSource, length: int) -> None:
        super().__init__(source, 1, length, 0)
        self.order = list(range(len(source)))


def provide(_num_samples: Any, vp_stage: int | None = None) -> list[Padded | None]:
    args = get_args()

    def chunked(path: str) -> SampleSource:
        return of_bounded_length(open_samples(path), args.seq_length, long_samples="chunk", what=path)[0]

    named = parse_mixture(args.mixed_data)
    sources, weights = [chunked(path) for _, path in named], [weight or 0.0 for weight, _ in named]
    stream = mixture(sources, weights, seed=args.seed, count=args.train_samples)
    return [
        InOrder(stream, args.seq_length),
        InOrder(end_to_end([chunked(args.mixed_valid_data)]), args.seq_length),
        None,
    ]


if __name__ == "__main__":
    provide.is_distributed = True  # type: ignore[attr-defined]
    pretrain_padded.add_data = add_data
    pretrain_padded.pretrain_with(provide)

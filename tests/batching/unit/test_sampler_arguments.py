"""Arguments of samplers that are of a wrong type: refused by name, before any plan is made."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dynapipe_ext.batching.sampling.samplers import DistributedTokenBatchSampler
from dynapipe_ext.batching.sampling.streaming import StreamingTokenBatches
from dynapipe_ext.errors import ConfigError, DataError

sampler = partial(DistributedTokenBatchSampler, [5], num_replicas=1, rank=0)


def stream(max_tokens: int, *, length_of: Callable[[Any], Any] = int, **options: Any) -> StreamingTokenBatches[Any]:
    return StreamingTokenBatches(lambda: iter([3.5, 4]), length_of, max_tokens=max_tokens, **options)


def quadratic(*coefficients: int) -> StreamingTokenBatches[Any]:
    return stream(8, objective="quadratic", coefficients=np.array(coefficients))


@pytest.mark.parametrize(
    ("error", "says", "make"),
    [
        (ConfigError, "max_tokens is '8' but must be an integer", lambda: sampler(max_tokens="8")),
        (ConfigError, r"max_tokens is 8\.5 but must be an integer", lambda: sampler(max_tokens=8.5)),
        (ConfigError, r"seed is 1\.7 but must be an integer", lambda: sampler(max_tokens=8, seed=1.7)),
        (ConfigError, "seed is -1 but must be an integer of 0 to", lambda: sampler(max_tokens=8, seed=-1)),
        (ConfigError, "shuffle is 'no' but must be True or False", lambda: sampler(max_tokens=8, shuffle="no")),
        (
            DataError,
            "lengths differ in their number of columns",
            lambda: DistributedTokenBatchSampler([[1, 2], [3]], max_tokens=8, num_replicas=1, rank=0),
        ),
        (ConfigError, "coefficients are 3 but must be two numbers", lambda: sampler(max_tokens=8, coefficients=3)),
        (ConfigError, r"epoch is 1\.5 but must be an integer", lambda: sampler(max_tokens=8).set_epoch(1.5)),
        (ConfigError, "num_batches is '3' but must be an integer", lambda: sampler(max_tokens=8).state_dict("3")),
        (ConfigError, r"rank is 0\.5 but", lambda: DistributedTokenBatchSampler([5], max_tokens=8, rank=0.5)),
        (
            DataError,
            "open_stream gave no samples: it must open the stream anew",
            lambda: list(StreamingTokenBatches(list, int, max_tokens=8)),
        ),
        (
            DataError,
            "the saved stream has max_tokens 8 but this one has 16: go on with the same",
            lambda: stream(16).load_state_dict(stream(8).state_dict()),
        ),
        (
            DataError,
            "the saved stream has window_steps 64 but this one has 4: ",
            lambda: stream(8, window_steps=4).load_state_dict(stream(8, window_steps=64).state_dict()),
        ),
        (
            DataError,
            r"has coefficients \[1, 2\] but this one has \[1, 3\]",
            lambda: quadratic(1, 3).load_state_dict(quadratic(1, 2).state_dict()),
        ),
        (
            DataError,
            "the saved stream has no pending: give what",
            lambda: stream(8).load_state_dict({"format": "dynapipe-stream/3"}),
        ),
        (DataError, r"sample 0 of the stream has 3\.5 tokens but 1 to", lambda: list(stream(8, length_of=float))),
        (DataError, "the state has format None but", lambda: sampler(max_tokens=8).load_state_dict(None)),
        (
            ConfigError,
            r"open_stream is \[5\] and",
            lambda: StreamingTokenBatches([5], len, max_tokens=8),
        ),
    ],
)
def test_an_argument_of_a_wrong_type_is_refused_by_name(
    error: type[Exception], says: str, make: Callable[[], Any]
) -> None:
    with pytest.raises(error, match=says):
        make()


@pytest.mark.parametrize(
    "change",
    [
        *({"fingerprint": value} for value in (None, -1, 1.5, {})),
        *({"segments": value} for value in (None, -1, "x", [[1]], [[1, "2"]], [[0, 1]], [[1, -1]])),
        *({"epoch": value} for value in (None, "x", [], 1.5, -1)),
        *({"carried": value} for value in (None, "x", 10**20, -1, [[1]], [1.5], [8], [-1])),
    ],
    ids=str,
)
def test_a_changed_state_is_refused_and_changes_nothing(change: dict[str, Any]) -> None:
    batches = DistributedTokenBatchSampler([3] * 8, max_tokens=8, num_replicas=2, rank=0)
    before = batches.state_dict(0)
    with pytest.raises(DataError, match="give"):
        batches.load_state_dict(batches.state_dict(1) | change)
    assert batches.state_dict(0) == before
    assert len(list(batches)) == 2


def test_a_rank_that_is_not_known_is_never_taken_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"which rank this is, of 2 ranks, is not known: call torch\.distributed"):
        DistributedTokenBatchSampler([4] * 16, max_tokens=8, num_replicas=2)
    fake = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: False, is_torchelastic_launched=lambda: True
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", fake)  # type: ignore[arg-type]
    for make in (
        lambda: DistributedTokenBatchSampler([4] * 16, max_tokens=8),
        lambda: StreamingTokenBatches(list, len, max_tokens=8),
    ):
        with pytest.raises(ConfigError, match="which rank this is, under torchrun, is not known"):
            make()
    assert DistributedTokenBatchSampler([4] * 16, max_tokens=8, num_replicas=2, rank=1).rank == 1


def test_a_stream_in_several_workers_of_a_loader_is_refused_as_each_would_give_every_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = StreamingTokenBatches(lambda: [4, 5], int, max_tokens=8, num_replicas=1, rank=0)
    worker = SimpleNamespace(num_workers=1)
    monkeypatch.setitem(sys.modules, "torch.utils.data", SimpleNamespace(get_worker_info=lambda: worker))  # type: ignore[arg-type]
    assert list(batches) == [[4], [5]]
    worker.num_workers = 2
    with pytest.raises(ConfigError, match="num_workers 2 would give every sample 2 times: take num_workers 0 or 1"):
        list(batches)


def test_numbers_of_numpy_make_the_state_of_pythons() -> None:
    lengths, one = [5, 3, 8, 2] * 9, np.int64(1)
    plain = DistributedTokenBatchSampler(
        lengths, max_tokens=8, seed=3, num_replicas=1, rank=0, objective="quadratic", coefficients=(1, 2)
    )
    numpys = DistributedTokenBatchSampler(
        lengths,
        max_tokens=np.int32(8),
        seed=np.int64(3),
        num_replicas=one,
        rank=one - 1,
        objective="quadratic",
        coefficients=np.array([1, 2], np.int32),  # type: ignore[arg-type]
    )
    plain.set_epoch(2)
    numpys.set_epoch(np.int64(2))  # type: ignore[arg-type]
    assert json.loads(json.dumps(numpys.state_dict(one))) == plain.state_dict(1)  # type: ignore[arg-type]
    assert list(numpys) == list(plain)

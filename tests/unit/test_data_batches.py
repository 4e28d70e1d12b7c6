import numpy as np
import pytest

from dynapipe_ext.data.batches import GlobalBatches, permutation
from dynapipe_ext.errors import ConfigError, DataError


def splitmix64(state):
    """Reference in plain integers, written from the paper: (next state, output)."""
    mask = (1 << 64) - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return state, z ^ (z >> 31)


def test_the_permutation_is_splitmix64_step_by_step():
    assert splitmix64(0)[1] == 0xE220A8397B1DCDAF  # the published first output of seed 0
    for seed, epoch in [(0, 0), (1, 0), (0, 1), (12345, 7), (2**64 - 1, 2**64 - 1)]:
        base = splitmix64(seed)[1]
        base = splitmix64(base + epoch * 0x9E3779B97F4A7C15)[1]
        keys, state = [], base
        for _ in range(100):
            state, key = splitmix64(state)
            keys.append(key)
        assert permutation(100, seed=seed, epoch=epoch).tolist() == sorted(range(100), key=keys.__getitem__)


def test_the_order_is_golden():
    assert permutation(12, seed=0, epoch=0).tolist() == [0, 7, 8, 11, 2, 5, 9, 4, 10, 6, 3, 1]
    assert permutation(12, seed=0, epoch=1).tolist() == [6, 0, 4, 5, 2, 10, 7, 9, 1, 11, 8, 3]
    assert permutation(12, seed=1234, epoch=0).tolist() == [7, 8, 11, 10, 4, 1, 2, 5, 0, 3, 9, 6]
    assert list(GlobalBatches(np.arange(1, 13), tokens_per_batch=20, seed=1234)) == [
        (7, 8),
        (11,),
        (10, 4, 1),
        (2, 5, 0, 3),
        (9, 6),
    ]


def test_permutations_of_seeds_and_epochs_differ_and_mix():
    orders = {tuple(permutation(50, seed=s, epoch=e)) for s in range(20) for e in range(20)}
    assert len(orders) == 400
    first_places = np.array([np.argsort(permutation(40, seed=s, epoch=0))[0] for s in range(4000)])
    counts = np.bincount(first_places, minlength=40)
    assert abs(counts - 100).max() < 50  # five standard deviations


def test_batches_of_samples():
    batches = GlobalBatches(np.full(7, 5), batch_size=3, seed=0, shuffle=False)
    assert list(batches) == [(0, 1, 2), (3, 4, 5), (6,)]
    assert (len(batches), batches.num_samples) == (3, 7)
    batches = GlobalBatches(np.full(7, 5), batch_size=3, seed=0, shuffle=False, drop_last=True)
    assert list(batches) == [(0, 1, 2), (3, 4, 5)]
    assert (len(batches), batches.num_samples) == (2, 6)


def test_drop_last_keeps_a_last_batch_that_is_full():
    assert len(GlobalBatches(np.full(6, 5), batch_size=3, seed=0, drop_last=True)) == 2
    assert len(GlobalBatches(np.full(6, 5), tokens_per_batch=15, seed=0, drop_last=True)) == 2
    assert len(GlobalBatches(np.full(6, 5), tokens_per_batch=16, seed=0, drop_last=True)) == 1


def test_the_budget_counts_encoder_and_decoder_positions():
    lengths = np.array([[3, 2, 2], [1, 4, 4], [4, 1, 1]])
    assert list(GlobalBatches(lengths, tokens_per_batch=10, seed=0, shuffle=False)) == [(0, 1), (2,)]


def test_a_given_order_is_kept():
    lengths = np.array([5, 9, 4, 7])
    batches = GlobalBatches(lengths, tokens_per_batch=12, seed=3, order=[3, 2, 0])
    assert list(batches) == [(3, 2), (0,)]
    assert list(GlobalBatches(lengths, batch_size=2, seed=9, order=np.array([1, 1 - 1, 1, 3]))) == [(1, 0), (1, 3)]


def test_indices_are_plain_integers():
    assert all(type(i) is int for batch in GlobalBatches(np.full(5, 2), batch_size=2, seed=0) for i in batch)


@pytest.mark.parametrize(
    ("error", "settings", "message"),
    [
        (ConfigError, {}, "batch_size is None and tokens_per_batch is None: give exactly one"),
        (ConfigError, {"batch_size": 2, "tokens_per_batch": 20}, "give exactly one"),
        (ConfigError, {"batch_size": 0}, "batch_size is 0 but must be an integer of at least 1"),
        (ConfigError, {"tokens_per_batch": -5}, "tokens_per_batch is -5 but must be an integer of at"),
        (ConfigError, {"batch_size": 2, "seed": -1}, "seed is -1 but must be an integer of 0 to"),
        (ConfigError, {"batch_size": 2, "seed": 2**64}, "seed is 18446744073709551616 but must"),
        (ConfigError, {"tokens_per_batch": "4096"}, "tokens_per_batch is '4096' but must be an integer"),
        (ConfigError, {"batch_size": 2, "seed": 1.5}, "seed is 1.5 but must be an integer"),
        (ConfigError, {"batch_size": 2, "epoch": -1}, "epoch is -1"),
        (ConfigError, {"batch_size": 9, "drop_last": True}, "drop_last leaves no global batch: 4 samples of 25 tokens"),
        (DataError, {"tokens_per_batch": 8}, "sample 1 has 9 tokens but tokens_per_batch is 8: raise it to at least 9"),
        (DataError, {"tokens_per_batch": 8, "order": [0, 1]}, "sample 1 has 9 tokens"),
        (DataError, {"batch_size": 2, "order": [0, 4]}, "order names sample 4 at place 1 but there are 4 samples"),
        (DataError, {"batch_size": 2, "order": [-1]}, "order names sample -1"),
        (DataError, {"batch_size": 2, "order": []}, "expected a list of sample indices"),
        (DataError, {"batch_size": 2, "order": [0.5]}, "expected a list of sample indices"),
        (DataError, {"lengths": np.zeros((0, 3), np.int64), "batch_size": 1}, "lengths is empty"),
        (DataError, {"batch_size": 2, "order": [0, 1, 2, 2]}, "order puts sample 2 twice into global batch 1"),
    ],
)
def test_what_cannot_work_is_refused_by_name(error, settings, message):
    with pytest.raises(error, match=message):
        GlobalBatches(**({"lengths": np.array([5, 9, 4, 7]), "seed": 0} | settings))


def test_a_sample_over_the_budget_outside_of_the_order_is_no_obstacle():
    assert list(GlobalBatches(np.array([5, 9]), tokens_per_batch=8, seed=0, order=[0])) == [(0,)]


def test_a_step_outside_is_an_index_error():
    batches = GlobalBatches(np.full(4, 5), batch_size=2, seed=0, epoch=3)
    for step in (-1, 2):
        with pytest.raises(IndexError, match=f"step {step} is outside of the 2 global batches of epoch 3"):
            batches[step]

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dynapipe_ext.data import batches
from dynapipe_ext.data.batches import GlobalBatches

SEEDS = st.integers(0, 2**64 - 1)
TOKENS = st.lists(st.integers(1, 50), min_size=1, max_size=60)


@given(TOKENS, st.integers(0, 60), SEEDS, st.integers(0, 5), st.booleans())
def test_token_batches_take_every_sample_once_and_as_many_as_fit(tokens, slack, seed, epoch, shuffle):
    budget = max(tokens) + slack
    batches = list(GlobalBatches(np.array(tokens), tokens_per_batch=budget, seed=seed, epoch=epoch, shuffle=shuffle))
    assert sorted(i for batch in batches for i in batch) == list(range(len(tokens)))
    for place, batch in enumerate(batches):
        assert 0 < sum(tokens[i] for i in batch) <= budget
        if place + 1 < len(batches):
            assert sum(tokens[i] for i in batch) + tokens[batches[place + 1][0]] > budget


@given(TOKENS, st.integers(1, 70), SEEDS)
def test_sample_batches_follow_the_same_order_as_token_batches(tokens, batch_size, seed):
    by_samples = list(GlobalBatches(np.array(tokens), batch_size=batch_size, seed=seed))
    by_tokens = list(GlobalBatches(np.array(tokens), tokens_per_batch=100, seed=seed))
    assert [i for batch in by_samples for i in batch] == [i for batch in by_tokens for i in batch]
    assert all(len(batch) == batch_size for batch in by_samples[:-1])


@given(TOKENS, SEEDS)
def test_drop_last_leaves_out_the_last_batch_at_most(tokens, seed):
    settings = {"tokens_per_batch": 50, "seed": seed}
    whole = list(GlobalBatches(np.array([*tokens, 50]), **settings))
    if len(whole) > 1:
        kept = GlobalBatches(np.array([*tokens, 50]), drop_last=True, **settings)
        assert list(kept) in (whole, whole[:-1])
        assert kept.num_samples == sum(map(len, kept))


@given(TOKENS, SEEDS)
def test_a_step_is_the_same_in_any_process_that_asks_for_it_alone(tokens, seed):
    batches = GlobalBatches(np.array(tokens), tokens_per_batch=64, seed=seed)
    step = len(batches) - 1
    assert GlobalBatches(np.array(tokens), tokens_per_batch=64, seed=seed)[step] == list(batches)[step]


@given(st.lists(st.integers(0, 2**64 - 1), max_size=300, unique=True), st.integers(0, 63))
def test_keys_are_sorted_as_a_stable_argsort_does(keys: list[int], shift: int) -> None:
    """Shifted down, so that many share all but their last bits."""
    distinct = np.array(sorted({key >> shift for key in keys}, key=lambda key: key * 2654435761 % 97), np.uint64)
    assert batches._ascending(distinct).tolist() == np.argsort(distinct, kind="stable").tolist()

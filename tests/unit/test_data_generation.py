import hashlib
import itertools

import pytest

from dynapipe_ext.data.examples import FAMILY_NAMES, Draw, generate_examples, generator_settings
from dynapipe_ext.errors import ConfigError


def words(example):
    return len(example.input.split()) + len(example.target.split())


def test_text_is_the_same_on_every_machine():
    text = "\n".join(f"{e.task}|{e.input}|{e.target}" for e in generate_examples(num_samples=500, seed=7))
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "829eb2e4e6bb7ece8d172272b951a55d8e2d5981ec4e40f59f36ea38eb0c4b17"
    )


def test_only_the_stable_generator_of_the_standard_library_is_used(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("not promised to be the same in every Python version")

    for name in ("randrange", "randint", "choice", "choices", "sample", "shuffle", "getrandbits", "_randbelow"):
        monkeypatch.setattr(f"random.Random.{name}", refuse, raising=False)
    assert len(list(generate_examples(num_samples=200, seed=1))) == 200


def test_a_longer_run_starts_with_the_shorter_one():
    short = list(generate_examples(num_samples=50, seed=3))
    assert list(itertools.islice(generate_examples(num_samples=500, seed=3), 50)) == short
    assert list(generate_examples(num_samples=50, seed=4)) != short


def test_lengths_vary_by_a_factor_of_a_hundred_and_the_tail_holds_half_of_the_words():
    lengths = sorted(map(words, generate_examples(num_samples=3000, seed=0)))
    assert lengths[-1] >= 100 * lengths[0]
    assert lengths[-1] <= 720
    assert sum(lengths[-len(lengths) // 10 :]) > 0.45 * sum(lengths)


def test_every_family_appears_and_families_differ_in_length():
    seen = {}
    for example in generate_examples(num_samples=3000, seed=0):
        seen.setdefault(example.task, []).append(words(example))
    assert set(seen) == set(FAMILY_NAMES)
    assert len(FAMILY_NAMES) >= 10
    means = sorted(sum(v) / len(v) for v in seen.values())
    assert means[0] < 10
    assert means[-1] > 200


ANSWERS = {
    "copy": lambda a: " ".join(a[1:]),
    "reverse": lambda a: " ".join(a[:0:-1]),
    "sort": lambda a: " ".join(sorted(a[1:], key=int)),
    "add": lambda a: str(int(a[1]) + int(a[2])),
    "largest": lambda a: str(max(map(int, a[1:]))),
    "parity": lambda a: ["no", "yes"][sum(map(int, a[1:])) % 2],
    "majority": lambda a: str(int(2 * sum(map(int, a[1:])) > len(a[1:]))),
    "caesar": lambda a: " ".join(chr((ord(c) - 97 + int(a[1])) % 26 + 97) for c in a[2:]),
    "count": lambda a: str(sum(c == a[1] for c in a[3:])),
    "repeat": lambda a: " ".join(a[2:] * int(a[1])),
    "lookup": lambda a: next(a[i + 3] for i in range(4, len(a), 4) if a[i : i + 2] == a[2:4]),
    "needle": lambda a: " ".join(a[(i := a.index("code", 5)) + 4 : i + 8]),
    "first_sentence": lambda a: " ".join(a[2 : a.index(".") + 1]),
    "extract": lambda a: " ".join(w for w in a[3:] if w in ("red", "blue", "green", "white", "black", "gold")),
}


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_target_follows_from_the_input(family):
    for example in generate_examples(num_samples=60, seed=5, families=[family]):
        assert example.task == family
        assert example.target == ANSWERS[family](example.input.split()), example


def test_draws_cover_their_range_and_no_more():
    draw = Draw("key")
    assert {draw.between(2, 5) for _ in range(200)} == {2, 3, 4, 5}
    assert {draw.skewed(2, 5) for _ in range(400)} == {2, 3, 4, 5}
    assert sorted(draw.distinct("abcd", 4)) == list("abcd")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 0}, "num_samples is 0 but must be at least 1"),
        ({"num_samples": 1, "families": ["chess"]}, "'chess': choose from copy, reverse"),
        ({"num_samples": 1, "families": []}, "an empty list"),
    ],
)
def test_bad_settings_are_refused_at_the_call(arguments, message):
    with pytest.raises(ConfigError, match=message):
        generate_examples(seed=0, **arguments)


def test_settings_for_a_fingerprint_change_with_each_argument():
    base = {"num_samples": 5, "seed": 0}
    variants = [base, base | {"seed": 1}, base | {"num_samples": 6}, base | {"families": ["copy"]}]
    settings = [generator_settings(**v) for v in variants]
    assert all(a != b for a, b in itertools.combinations(settings, 2))
    assert generator_settings(**base) == generator_settings(**base, families=FAMILY_NAMES)

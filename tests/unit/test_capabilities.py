"""The table of what works with what: each limit rejects a run by itself, in a sentence that says what to do."""

from __future__ import annotations

from typing import get_args

import pytest

from dynapipe_ext.capabilities import LIMITS, Limit, RunFeature, check_features, find_limit, list_features
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.settings.train_config import TrainConfig
from tests.support import capabilities_page

EVERY = [limit for limits in LIMITS.values() for limit in limits]
_MOST_CHARACTERS = 200


def test_every_feature_has_a_limit_and_none_hides_another() -> None:
    assert {limit.feature for limit in EVERY} == {*get_args(RunFeature)}
    assert [limit for limit in EVERY if find_limit(limit.feature, limit.kinds) is not limit] == []


@pytest.mark.parametrize("limit", EVERY, ids=lambda limit: f"{limit.feature}, {'+'.join(limit.kinds)}")
def test_a_rejection_is_short_and_ends_with_what_to_do(limit: Limit) -> None:
    text = str(limit.make_error("[topology] vocabulary_parallel is 'head'"))
    assert text.endswith(f" but {limit.reason}: {limit.move}")
    assert len(text) <= _MOST_CHARACTERS


@pytest.mark.parametrize("part", LIMITS)
def test_the_first_limit_that_holds_rejects_the_settings(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under every pair of a limit's kinds and its feature, whatever setting asks for it."""
    config = TrainConfig()
    for limit in LIMITS[part]:
        monkeypatch.setattr("dynapipe_ext.capabilities.find_kinds", lambda _, limit=limit: {*limit.kinds})
        monkeypatch.setattr(
            "dynapipe_ext.capabilities.list_features", lambda _, limit=limit: iter([(limit.feature, "it is so")])
        )
        with pytest.raises(ConfigError) as error:
            check_features(config, part, "job.toml: ")  # type: ignore[arg-type]
        assert str(error.value) == f"job.toml: it is so but {limit.reason}: {limit.move}"


def test_settings_as_they_come_ask_for_few_features() -> None:
    features = dict(list_features(TrainConfig()))
    assert features["tensor parallelism"] == "[topology] tp is 2"
    assert not {"comparison", "pieces of long samples", "adapters"} & features.keys()


def test_the_page_is_made_of_the_table() -> None:
    said = capabilities_page.PAGE.read_text()
    assert said == capabilities_page.page(), "write it again: python -m tests.support.capabilities_page"

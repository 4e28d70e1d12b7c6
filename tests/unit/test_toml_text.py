"""A file of settings that would take the machine is refused before its parser takes memory for it."""

from pathlib import Path

import pytest

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.settings.train_config import TrainConfig
from dynapipe_ext.toml_text import parse_toml

MANY = 20_000  # of which the parser's memory takes the square
LONG_KEYS = {
    "bare": ".".join("a" * MANY) + " = 1",
    "a table": "[" + ".".join("a" * MANY) + "]",
    "quoted": " . ".join([r'"\""'] * MANY) + " = 1",
    "literal": ".".join(["'a b'"] * MANY) + " = 1",
    "in a value": "x = {" + ".".join("a" * MANY) + " = 1}",
}


@pytest.mark.parametrize("text", LONG_KEYS.values(), ids=list(LONG_KEYS))
def test_a_key_of_thousands_of_names_is_refused_by_its_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(f"# settings\n{text}\n")
    with pytest.raises(ConfigError, match=r"a key has more than 32 names \(line 2\): give a file of settings"):
        TrainConfig.read(tmp_path / "config.toml")


def test_long_texts_and_paths_are_no_keys() -> None:
    path = "a.b/" * 1000
    assert parse_toml(f'[data]\nfiles = ["{path}", "{path}"] # {path}')["data"]["files"] == [path, path]
    assert parse_toml(".".join(["a"] * 32) + " = 1")

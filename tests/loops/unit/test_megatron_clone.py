"""Which clones of Megatron-LM planned schedules fit, by what their sources say."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.drop_in.clone import ENTRY_POINTS, STEP_KEYWORDS, clone_version, misfits
from dynapipe_ext.launch import cli


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Of version 0.16.1, with everything where it should be."""
    lines: dict[str, list[str]] = {"megatron/core/package_info.py": ["MAJOR = 0", "MINOR = 16", "PATCH = 1"]}
    for entry in ENTRY_POINTS:
        lines.setdefault(entry.file, []).append(f"def {entry.name}({', '.join(sorted(entry.parameters))}): ...")
    for name, text in lines.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("\n".join(text))
    return tmp_path


def edit(place: Path, before: str, after: str) -> None:
    text = place.read_text()
    assert before in text
    place.write_text(text.replace(before, after))


def test_the_keywords_are_those_of_the_function_that_takes_the_place_of_megatrons() -> None:
    from dynapipe_ext.executor.drop_in.drop_in import ForwardBackward

    assert {"self", *STEP_KEYWORDS} == {*inspect.signature(ForwardBackward.__call__).parameters}


@pytest.mark.parametrize(
    ("name", "before", "after", "told"),
    [
        ("training/training.py", "def get_train_valid", "def get_other", "samples of megatron/training/training.py is"),
        ("core/pipeline_parallel/schedules.py", "(pp_size,", "(groups, pp_size,", "schedules.py takes groups"),
        ("core/pipeline_parallel/schedules.py", ", schedule_pg_collection", "", ""),
        ("core/pipeline_parallel/schedules.py", "vp_stage", "chunk", "takes chunk, does not take vp_stage"),
        ("core/pipeline_parallel/schedules.py", "pg_collection", "groups", "takes groups"),
        (
            "training/training.py",
            "log(iteration)",
            "log(loss, step)",
            "training.py does not take iteration",
        ),
        ("training/training.py", "log(iteration)", "log(loss, iteration)", ""),
        ("training/arguments.py", "(extra", "(parser, extra", "takes parser"),
        ("training/global_vars.py", "(args)", "(args, other=None)", ""),
    ],
)
def test_what_is_gone_or_takes_something_else_is_named(
    clone: Path, name: str, before: str, after: str, told: str
) -> None:
    assert misfits(clone) == []
    edit(clone / "megatron" / name, before, after)
    assert told in "; ".join(misfits(clone))
    assert bool(misfits(clone)) == bool(told)


def test_a_folder_that_is_no_clone_is_refused(clone: Path) -> None:
    with pytest.raises(ConfigError, match="give the root of a clone of Megatron-LM"):
        clone_version(clone / "megatron")
    edit(clone / "megatron/core/package_info.py", "PATCH", "PATCHES")
    with pytest.raises(ConfigError, match="does not say PATCH"):
        clone_version(clone)
    (clone / "megatron/training/training.py").write_text("def (")
    with pytest.raises(ConfigError, match=r"training\.py is no Python"):
        misfits(clone)


def test_doctor_says_what_fits_of_a_clone(clone: Path, capsys: Any) -> None:
    def found() -> tuple[bool, str, str]:
        cli.main(["doctor", "--json", "--megatron", str(clone)])
        checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
        assert checks["Megatron-LM"]["required"]
        return checks["Megatron-LM"]["ok"], checks["Megatron-LM"]["value"], checks["Megatron-LM"]["hint"]

    assert found() == (True, f"0.16.1  {clone}", "")
    edit(clone / "megatron/core/package_info.py", "MINOR = 16", "MINOR = 15")
    assert found() == (False, f"0.15.1  {clone}", "its version is not supported: take core_v0.16.1")

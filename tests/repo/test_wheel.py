"""What lands in the wheel."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.limits import LIMIT_S


@pytest.fixture(scope="module")
def wheel_names(root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Paths inside a wheel that was built from this checkout, without compiling again what set-up has compiled."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--outdir",
        str(folder),
        "-Cwheel.cmake=false",
        "-Cwheel.py-api=py3",
    ]
    if importlib.util.find_spec("scikit_build_core") is not None:
        command.append("--no-isolation")
    done = subprocess.run(
        [*command, str(root)], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if not name.endswith("/")]


def test_the_wheels_top_level_is_one_package(wheel_names: list[str]) -> None:
    tops = {name.partition("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"dynapipe_ext"}
    assert len(tops) == 2


def test_every_module_of_every_folder_is_in_the_wheel(wheel_names: list[str], all_sources: list) -> None:  # type: ignore[type-arg]
    wanted = set()
    for source in all_sources:
        folder, _, rest = source.path.partition("/")
        wanted.add(f"dynapipe_ext/{rest}" if folder == "dynapipe_ext" else f"dynapipe_ext/{source.path}")
    assert wanted - set(wheel_names) == set()


def test_data_files_and_the_licence_are_in_the_wheel(wheel_names: list[str], root: Path) -> None:
    configs = {f"dynapipe_ext/launch/configs/{file.name}" for file in (root / "launch/configs").glob("*.toml")}
    assert configs - set(wheel_names) == set()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_names)


def test_no_test_or_leftover_is_in_the_wheel(wheel_names: list[str]) -> None:
    bad = [name for name in wheel_names if "test" in name.lower() or name.endswith((".pyc", ".log", ".so", ".cpp"))]
    assert bad == []


def test_set_up_has_installed_the_compiled_core_inside_the_one_package() -> None:
    from dynapipe_ext import _core  # type: ignore[attr-defined]

    assert Path(_core.__file__).parent.name == "dynapipe_ext"
    assert Path(_core.__file__).is_relative_to(sys.prefix)


def test_a_build_without_a_compiler_ends_with_what_to_install(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core")
    build = (
        f"from scikit_build_core import build; build.build_wheel({str(tmp_path)!r}, {{'build-dir': {str(tmp_path)!r}}})"
    )
    done = subprocess.run(
        [sys.executable, "-c", build],
        cwd=root,
        env={**os.environ, "CXX": str(tmp_path / "none")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode != 0
    last = done.stdout.rstrip().splitlines()[-1]
    assert "install g++ or clang++ (C++17), and install dynapipe-ext again" in last, done.stdout

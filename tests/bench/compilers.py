"""Whether plans have the same bytes whatever compiles the core.

    python tests/bench/compilers.py [COMPILER ...]

Builds the core with every compiler (default: g++ and clang++, if installed) at -O0 and at -O3, and makes the plans of
tests/golden/test_plan_digests.py with each. Exit status 1 if a plan differs from the recorded one.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEVELS = ("-O0", "-O3")


def build(compiler: str, level: str, folder: Path) -> Path:
    """Return the compiled core in `folder`."""
    import nanobind

    settings = {
        "CMAKE_CXX_COMPILER": shutil.which(compiler) or compiler,
        "CMAKE_BUILD_TYPE": "None",
        "CMAKE_CXX_FLAGS": level,
        "nanobind_DIR": nanobind.cmake_dir(),
        "Python_EXECUTABLE": sys.executable,
    }
    flags = [f"-D{name}={value}" for name, value in settings.items()]
    source = ROOT / "dynapipe_ext" / "_native"
    subprocess.run(["cmake", "-S", source, "-B", folder, *flags], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", folder], check=True, stdout=subprocess.DEVNULL)
    (core,) = folder.glob("_core*.so")
    return core


def differing_plans(core: Path) -> list[str]:
    """Return the names of plans that this core makes otherwise than recorded; for a process of its own."""
    spec = importlib.util.spec_from_file_location("dynapipe_ext._core", core)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["dynapipe_ext._core"] = module
    sys.path.insert(0, str(ROOT))
    from dynapipe_ext.core import native
    from tests.golden.test_plan_digests import CASES, DIGESTS

    assert Path(native.__file__ or "") == core
    recorded = json.loads(DIGESTS.read_text())
    return [name for name, digest in CASES.items() if digest() != recorded[name]]


def main() -> int:
    if sys.argv[1:2] == ["--core"]:
        print(json.dumps(differing_plans(Path(sys.argv[2]))))
        return 0
    compilers = sys.argv[1:] or [name for name in ("g++", "clang++") if shutil.which(name)]
    num_differing = 0
    for compiler, level in product(compilers, LEVELS):
        with tempfile.TemporaryDirectory() as folder:
            core = build(compiler, level, Path(folder))
            made = subprocess.run(
                [sys.executable, __file__, "--core", str(core)], check=True, capture_output=True, text=True, cwd=ROOT
            )
            differing = json.loads(made.stdout)
        num_differing += len(differing)
        print(f"{compiler} {level}: {', '.join(differing) or 'the recorded plans'}", flush=True)
    return int(num_differing > 0)


if __name__ == "__main__":
    sys.exit(main())

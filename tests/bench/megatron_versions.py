"""The tests of what runs on megatron-core, on other releases of it than the installed one.

    python tests/bench/megatron_versions.py [VERSION ...] [--clones DIR] [--output results/megatron_versions.json]

Each release is installed into a virtual environment of its own under build/, which finds all else in the environment of
this interpreter; where Python is older than the wheel asks for, that is ignored. DIR/VERSION is a clone of Megatron-LM
at that release: its pretrain_gpt.py is no part of the wheel, and the test of that script is left out without it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from contenders import provenance

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
RELEASES = ("0.17.1", "0.18.2", "0.19.2")
SCRIPT = "integration/test_megatron_script.py"
TESTS = (
    SCRIPT,
    "integration/test_megatron_drop_in.py",
    "unit/test_models.py",
    "unit/test_megatron_cpu.py",
    "unit/test_megatron_model.py",
    "unit/test_megatron_placement.py",
    "integration/test_oracle.py",
    "integration/test_checkpoints.py",
    "checkpoint/integration/test_megatron_checkpoints.py",
)


def environment(release: str) -> Path:
    """The interpreter of an environment with that release before all that this one has."""
    folder = ROOT / "build" / f"megatron-{release}"
    python = folder / "bin" / "python"
    names = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", names))
    if not (site / "megatron" / "core").is_dir():
        venv.create(folder, clear=True)
        here = sysconfig.get_path("purelib")
        (site / "beside.pth").write_text(f"import site; site.addsitedir({here!r})\n")
        wanted = [f"megatron-core=={release}", "omegaconf", "antlr4-python3-runtime==4.9.3"]
        options = ["-q", "--no-deps", "--ignore-requires-python", "--target", str(site)]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *wanted], check=True)
    return python


def ran(python: Path, test: str, clone: Path | None, timeout_s: float) -> dict[str, Any]:
    """How many of a file's tests passed, were skipped and failed, and which failed."""
    report = python.parents[1] / "report.xml"
    report.unlink(missing_ok=True)
    variables = {"OMP_NUM_THREADS": "1", "DYNAPIPE_MEGATRON_LM": str(clone or "")}
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", f"--junitxml={report}"]
    command = [str(python), "-m", "pytest", *options, str(ROOT / "tests" / test)]
    try:
        subprocess.run(command, cwd=ROOT, env=os.environ | variables, timeout=timeout_s, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (subprocess.TimeoutExpired, FileNotFoundError) as error:
        return {"ended": str(error)}
    found = Counter(_outcome(case) for case in cases)
    failed = [case.get("name") for case in cases if _outcome(case) == "failed"]
    return {**found, **({"names": failed} if failed else {})}


def _outcome(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    return "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=RELEASES, metavar="VERSION")
    parser.add_argument("--clones", type=Path, metavar="DIR")
    parser.add_argument("--only", nargs="*", default=TESTS, choices=TESTS, metavar="TEST")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="of one test file")
    parser.add_argument("--output", type=Path, default=RESULTS / "megatron_versions.json")
    parser.add_argument("--machine", default="")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for release in args.versions:
        python = environment(release)
        clone = args.clones / release if args.clones is not None else None
        tests = [test for test in args.only if clone is not None or test != SCRIPT]
        found[release] = {}
        for test in tests:
            found[release][test] = ran(python, test, clone, args.timeout)
            print(release, test, found[release][test], flush=True)
        args.output.write_text(json.dumps({**provenance(args.machine), "releases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Nothing is unpickled that another rank, a file or a peer could have written."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.conftest import Source

_OWN_TASKS = {"dynapipe_ext/data/preprocessing/workers.py"}  # what Ray brings back of this process's own tasks


def unpickling(source: str) -> list[str]:
    """Calls that unpickle: torch's collectives of objects, pickle's readers, torch.load of more than weights."""
    named = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        safe = any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)
        last = name.rpartition(".")[2]
        of_objects = any(f"{verb}_object" in last for verb in ("broadcast", "gather", "scatter", "send", "recv"))
        reads = name in ("pickle.load", "pickle.loads") or last == "Unpickler" or (name == "torch.load" and not safe)
        if of_objects or reads:
            named.append(f"{name}, line {node.lineno}")
    return named


def test_no_code_of_ours_unpickles(all_sources: list[Source], root: Path) -> None:
    calls = {source.path: unpickling(source.file.read_text()) for source in all_sources}
    assert {path: lines for path, lines in calls.items() if lines and path not in _OWN_TASKS} == {}
    assert all(calls[path] for path in _OWN_TASKS)


def test_such_calls_are_seen() -> None:
    code = "dist.broadcast_object_list(x)\npickle.loads(b)\ntorch.load(f)\ntorch.load(f, weights_only=True)\n"
    assert [line.partition(",")[0] for line in unpickling(code)] == [
        "dist.broadcast_object_list", "pickle.loads", "torch.load"
    ]  # fmt: skip

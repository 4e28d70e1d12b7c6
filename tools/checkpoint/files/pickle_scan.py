"""What loading a pickle would take of memory and time, found before it is loaded and before what it gives is used.

A kilobyte may hold a tuple that holds a tuple twice, and so on for fifty times. As the key of a dictionary its hash
would take years, and nested a million deep it would end the process; both happen within the loading.
"""

from __future__ import annotations

import pickletools
from collections.abc import Collection, Mapping
from typing import IO, Any, NamedTuple

_MOST_PICKLE_BYTES = 1 << 28  # names and shapes; tensors lie beside it
_MOST_OBJECTS = 1 << 26
_MOST_DEPTH = 200
_WORK_PER_BYTE = 16  # values that hashing may look at, for each byte of the pickle
_FREE_WORK = 1 << 16
_MOST_REPEATED = 1 << 20  # values that unfolding may add


_Value = tuple[int, int]  # on the stack: how many values its hash looks at, and how deep; above 1 for tuples only
_MARK, _ONE = (0, 0), (1, 1)
_MEMO_PUTS, _MEMO_GETS = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), ("GET", "BINGET", "LONG_BINGET")
# A name that stands for `tuple` makes one of what it is called with.
_MAKE_TUPLES = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ", "INST")
_HASH_KEYS, _HASH_ALL = ("SETITEM", "SETITEMS", "DICT"), ("ADDITEMS", "FROZENSET")
_PUSHES = {one.name for one in pickletools.opcodes if not one.stack_before and len(one.stack_after) == 1}
_PUSHES -= {"MARK", *_MEMO_GETS}


class _Effect(NamedTuple):
    """What an operation does to the stack: it takes all down to the last mark, and this many values more."""

    to_mark: bool
    taken: int
    left: int


def _effect(operation: Any) -> _Effect:
    before = operation.stack_before
    to_mark = pickletools.markobject in before
    taken = before.index(pickletools.markobject) if to_mark else len(before)
    return _Effect(to_mark, taken, len(operation.stack_after))


_EFFECTS: Mapping[str, _Effect] = {operation.name: _effect(operation) for operation in pickletools.opcodes}


def refuse_size(num_bytes: int) -> None:
    """Refuse more bytes than names and shapes take. Raises ValueError."""
    if num_bytes > _MOST_PICKLE_BYTES:
        raise ValueError(f"its pickle has {num_bytes:,} bytes, more than {_MOST_PICKLE_BYTES:,}")


def pickle_size(file: IO[bytes]) -> int:
    """Return the bytes of the pickle at the file's position, which moves beyond it.

    Raises ValueError if it is cut or broken, or if loading would take memory or time that its size does not explain.
    """
    start = file.tell()
    stack: list[_Value] = []
    remembered: dict[int, _Value] = {}
    num_objects = largest = work = 0
    for operation, argument, place in pickletools.genops(file):  # it also finds lengths that reach beyond the end
        name = operation.name
        if name in _PUSHES:
            stack.append(_ONE)
            num_objects += 1
        elif name in _MEMO_PUTS:
            key = int(argument or 0) if name != "MEMOIZE" else len(remembered)
            remembered[key], largest = stack[-1], max(largest, key)
        elif name in _MEMO_GETS:
            stack.append(remembered[int(argument or 0)])
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "DUP":
            stack.append(stack[-1])
        else:
            effect = _EFFECTS[name]
            taken = _taken(stack, effect)
            made = _made_of(taken) if name in _MAKE_TUPLES else _ONE
            if name in _HASH_KEYS or name in _HASH_ALL:
                work += sum(size for size, _ in (taken[1::2] if name in _HASH_KEYS else taken))
            if max(made[0], work) > _FREE_WORK + _WORK_PER_BYTE * ((place or 0) - start) or made[1] > _MOST_DEPTH:
                raise ValueError(f"it nests tuples {made[1]:,} deep, or holds them more often than it may")
            stack += [made] * effect.left
            num_objects += effect.left
    num_bytes = file.tell() - start
    refuse_size(num_bytes)
    if num_objects > _MOST_OBJECTS:
        raise ValueError(f"it makes {num_objects:,} values, more than {_MOST_OBJECTS:,}")
    if largest > num_bytes:  # the unpickler remembers in a list up to it
        raise ValueError(f"value {largest:,} is remembered in a pickle of {num_bytes:,} bytes")
    return num_bytes


def _taken(stack: list[_Value], effect: _Effect) -> list[_Value]:
    """Return what an operation takes from the stack, the last one first."""
    taken = []
    if effect.to_mark:
        while (value := stack.pop()) is not _MARK:
            taken.append(value)
    taken += [stack.pop() for _ in range(effect.taken)]
    return taken


def _made_of(values: list[_Value]) -> _Value:
    return 1 + sum(size for size, _ in values), 1 + max((depth for _, depth in values), default=0)


def refuse_unfolding(tree: Any, objects: tuple[type, ...]) -> None:
    """Refuse what no code can copy, compare or show: containers that are nested too deep, hold themselves, or hold a
    container twice, again and again, so that unfolded they are far more values than they are.

    It looks into containers and into the attributes of `objects`, which may lead back to themselves. Raises ValueError.
    """
    unfolded: dict[int, int] = {}  # 0: not counted yet
    num_values = depth = 0
    pending = [(tree, False)]
    while pending:
        value, is_counted = pending.pop()
        entries = vars(value).values() if isinstance(value, objects) else _entries(value)
        if is_counted:
            unfolded[id(value)] = 1 + sum(unfolded.get(id(entry), 1) for entry in entries)
            depth -= 1
        elif entries and id(value) not in unfolded:
            unfolded[id(value)], num_values, depth = 0, num_values + 1 + len(entries), depth + 1
            if depth > _MOST_DEPTH:
                raise ValueError(f"its values are nested more than {_MOST_DEPTH} deep")
            pending.append((value, True))
            pending += [(entry, False) for entry in entries]
        elif entries and not unfolded[id(value)] and not isinstance(value, objects):
            raise ValueError("it holds itself")
    if unfolded.get(id(tree), 1) > 2 * num_values + _MOST_REPEATED:
        raise ValueError(f"its {num_values:,} values hold one another more often than they may")


def _entries(value: Any) -> Collection[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple | set | frozenset) else ()

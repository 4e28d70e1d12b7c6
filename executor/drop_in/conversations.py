"""Megatron-LM's conversations (`--sft`), tokenized once by the ranks of a host together, into a folder."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dynapipe_ext.data.dataset import TARGETS_FILE, TOKENS_FILE, TokenDataset, is_prepared, move_into_place, seal
from dynapipe_ext.errors import DataError, DynaPipeError

_IGNORED = -100  # the label with which Megatron-LM's tokenizers mark what is not to be learnt
_VERSION = 1  # raise it with every change of what is kept
_BLOCK_LINES = 64  # that one rank takes at a time
_NUM_CHECKED = 16  # conversations of a kept folder that are tokenized again
_READ_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class HostShare:
    """This rank's part of what its host does together: it is number `place` of `ranks`, those of the host. `gather` is
    a collective call of all ranks, on all hosts: every rank's value."""

    place: int = 0
    ranks: tuple[int, ...] = (0,)
    host: str = "here"
    gather: Callable[[Any], list[Any]] = lambda value: [value]

    @classmethod
    def of_ranks(cls, host: str, rank: int, gather: Callable[[Any], list[Any]]) -> HostShare:
        """From the name of this rank's host."""
        ranks = tuple(one for one, name in enumerate(gather(host)) if name == host)
        return cls(ranks.index(rank), ranks, host, gather)

    def first(self, work: Callable[[], Any]) -> Any:
        """What the host's first rank makes of `work`, on each of them. A collective call. Errors: DataError, on all
        ranks, where it fails anywhere."""
        return self.each(work if self.place == 0 else lambda: None)[self.ranks[0]]

    def each(self, work: Callable[[], Any]) -> list[Any]:
        """What each rank makes of `work`, on all ranks. A collective call. Errors: as those of `first`."""
        outcomes = self.gather(_outcome(work))
        for _, error in outcomes:
            if error is not None:
                raise DataError(error)
        return [value for value, _ in outcomes]


def _outcome(work: Callable[[], Any]) -> list[Any]:
    """A value or, for the other ranks to know, what went wrong."""
    try:
        return [work(), None]
    except (DynaPipeError, OSError) as error:
        return [None, str(error)]


def kept_conversations(path: str | Path, tokenizer: Any, *, kept_in: Path, share: HostShare) -> TokenDataset:
    """The conversations of a file of JSON lines with "messages", a sample each, their prompts masked.

    `tokenizer` is Megatron-LM's (`tokenize_conversation`). A line with several conversations, each begun by a system
    message, holds as many samples. They are tokenized once for a file and a tokenizer, and kept in a folder in
    `kept_in`, which is made anew where its first conversations are tokenized otherwise now. A collective call of all
    ranks. Errors: DataError.
    """
    file = Path(path)
    folder = kept_in / share.first(lambda: _digest(file, tokenizer))
    partial = folder.with_name(f".{folder.name}.{share.host}.partial")
    count = len(share.ranks)
    is_kept = share.first(
        lambda: _is_kept(folder, file, tokenizer) or _made(partial)
    )  # on this host: others may lack it
    share.each(lambda: _tokenize_share(file, tokenizer, partial, share.place, count, is_kept=is_kept))
    share.first(lambda: _join(partial, folder, count, what=str(file), is_kept=is_kept))
    return TokenDataset.open(folder)


def _made(partial: Path) -> bool:
    """False, once the folder is there and empty."""
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise DataError(
            f"{partial} cannot be made ({error.strerror}): name a folder for tokens of conversations by"
            " --data-cache-path"
        ) from error
    return False


def _digest(path: Path, tokenizer: Any) -> str:
    """Of the file's content and what names the tokenizer."""
    names = ("unique_description", "_prompt_format", "vocab_size", "eod")
    about = {name: str(value) for name in names if (value := getattr(tokenizer, name, None)) is not None}
    digest = hashlib.sha256(json.dumps([_VERSION, type(tokenizer).__name__, about], sort_keys=True).encode())
    try:
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
    except OSError as error:
        raise DataError(f"{path} cannot be read as JSON lines: {error}") from error
    return digest.hexdigest()[:32]


def _is_kept(folder: Path, path: Path, tokenizer: Any) -> bool:
    """Whether the folder is there, and its first conversations are what this tokenizer makes of the file's."""
    if not is_prepared(folder):
        return False
    dataset = TokenDataset.open(folder)
    conversations = ((where, one) for where, all_of_line in _read(path) for one in all_of_line)
    for index, (where, messages) in enumerate(itertools.islice(conversations, _NUM_CHECKED)):
        tokens, is_target = _tokenized(messages, tokenizer, where)
        if index >= len(dataset):
            return False
        sample = dataset[index]
        if not (np.array_equal(sample.tokens, tokens) and np.array_equal(sample.is_target, is_target)):
            return False
    return True


def _tokenize_share(path: Path, tokenizer: Any, partial: Path, place: int, count: int, *, is_kept: bool) -> None:
    """Write this rank's blocks of lines: tokens, targets, and the sizes of the conversations of each block."""
    if is_kept:
        return
    sizes: list[list[int]] = []
    with _part(partial, place, "tokens").open("wb") as tokens_file, _part(partial, place, "targets").open("wb") as mask:
        for number, lines in enumerate(_blocks(_read(path))):
            if number % count != place:
                continue
            sizes.append([])
            for where, conversations in lines:
                for messages in conversations:
                    tokens, is_target = _tokenized(messages, tokenizer, where)
                    tokens_file.write(tokens.astype("<i4").tobytes())
                    mask.write(is_target.astype(np.uint8).tobytes())
                    sizes[-1].append(len(tokens))
    _part(partial, place, "sizes").write_text(json.dumps(sizes))


def _part(partial: Path, place: int, name: str) -> Path:
    return partial / f"{place}.{name}"


def _join(partial: Path, folder: Path, count: int, *, what: str, is_kept: bool) -> None:
    """One folder of all ranks' blocks, in the order of the file."""
    if is_kept:
        return
    sizes = [json.loads(_part(partial, place, "sizes").read_text()) for place in range(count)]
    blocks = [(place, number) for number in range(max(map(len, sizes))) for place in range(count)]
    blocks = [(place, number) for place, number in blocks if number < len(sizes[place])]
    in_order = np.array([size for place, number in blocks for size in sizes[place][number]], np.int64)
    if not len(in_order):
        raise DataError(f'{what} holds no conversations: give lines of {{"messages": [...]}}')
    tokens = [np.fromfile(_part(partial, place, "tokens"), "<i4") for place in range(count)]
    targets = [np.fromfile(_part(partial, place, "targets"), np.uint8) for place in range(count)]
    largest = max(int(part.max(initial=0)) for part in tokens)
    dtype = np.dtype("<u2" if largest < 1 << 16 else "<u4")
    ends = [np.cumsum([0, *map(sum, blocks_of_rank)]) for blocks_of_rank in sizes]
    with (partial / TOKENS_FILE).open("wb") as tokens_file, (partial / TARGETS_FILE).open("wb") as mask:
        for place, number in blocks:
            block = slice(ends[place][number], ends[place][number + 1])
            tokens_file.write(tokens[place][block].astype(dtype).tobytes())
            mask.write(targets[place][block].tobytes())
    for place, name in itertools.product(range(count), ("tokens", "targets", "sizes")):
        _part(partial, place, name).unlink()
    seal(
        partial,
        dtype=dtype,
        sizes=in_order,
        first_target=np.ones(len(in_order), np.int32),
        task_ids=np.zeros(len(in_order), np.int32),
        tasks=["unnamed"],
        tokenizer_json=None,
        vocab_size=largest + 1,
        facts={"num_truncated": 0, "num_skipped": 0, "source": folder.name},
    )
    move_into_place(partial, folder)


def _blocks(lines: Iterator[Any]) -> Iterator[list[Any]]:
    while block := list(itertools.islice(lines, _BLOCK_LINES)):
        yield block


def _read(path: Path) -> Iterator[tuple[str, list[list[Mapping[str, Any]]]]]:
    """The place of each line that is not empty, and its conversations. Errors: DataError."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    where = f"{path}, line {number}"
                    yield where, _conversations(json.loads(line), where)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON lines: {error}") from error


def _conversations(raw: Any, where: str) -> list[list[Mapping[str, Any]]]:
    messages = raw.get("messages") if isinstance(raw, dict) else None
    if not isinstance(messages, list) or not messages:
        raise DataError(f'{where}: it has no "messages", a list of role and content')
    conversations: list[list[Mapping[str, Any]]] = [[]]
    for message in messages:
        if not (isinstance(message, dict) and {"role", "content"} <= message.keys()):
            raise DataError(f"{where}: a message has no role and content but is {message!r}")
        if message["role"] == "system" and conversations[-1]:
            conversations.append([])
        conversations[-1].append(message)
    return conversations


def _tokenized(
    messages: list[Mapping[str, Any]], tokenizer: Any, where: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """A conversation's tokens, and whether each is to be learnt. Errors: DataError."""
    try:
        tokens, targets = tokenizer.tokenize_conversation(messages, return_target=True, add_generation_prompt=False)
    except Exception as error:
        raise DataError(
            f"{where}: the tokenizer refuses the conversation ({re.sub(chr(10), ' ', str(error))})"
        ) from error
    tokens, targets = np.asarray(tokens, np.int64), np.asarray(targets, np.int64)
    if not len(tokens) or tokens[-1] != tokenizer.eod:
        tokens, targets = np.append(tokens, tokenizer.eod), np.append(targets, tokenizer.eod)
    is_target = targets != _IGNORED
    is_target[0] = False  # nothing comes before it
    if len(tokens) < 2 or not np.array_equal(tokens[is_target], targets[is_target]):
        raise DataError(f"{where}: the tokenizer gives {len(tokens)} tokens, or targets that are no tokens of them")
    return tokens, is_target

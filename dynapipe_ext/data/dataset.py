"""Prepared tokens on disk: a folder of samples, written whole or not at all, and read as memory maps."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import LengthArray, get_document_lengths
from dynapipe_ext.data.examples import Example
from dynapipe_ext.data.length_bounds import LengthBounds, TaskBounds, Truncation
from dynapipe_ext.data.tokenizer import FILE_NAME, BytesTokenizer, Tokenizer, train_tokenizer
from dynapipe_ext.durable_files import file_stamp, replace_folder
from dynapipe_ext.errors import NO_ARRAY, ConfigError, DataError, short, writing_move

if TYPE_CHECKING:
    from dynapipe_ext.data.preprocessing.encoders import Encoder

FORMAT = "dynapipe-tokens/1"
TOKENS_FILE = "tokens.bin"
TARGETS_FILE = "targets.bin"
ARRAYS = ("offsets", "first_target", "task_ids", "lengths")
FIRST_DOCUMENTS = "num_first"  # one more of pairs of documents
_CHUNK_SAMPLES = 1 << 18
_READ_BYTES = 4 << 20


def seal(
    folder: Path,
    *,
    dtype: np.dtype[Any],
    sizes: npt.NDArray[np.int64],
    first_target: npt.NDArray[np.int32],
    task_ids: npt.NDArray[np.int32],
    num_first: npt.NDArray[np.int32] | None = None,
    tasks: Sequence[str],
    tokenizer_json: str | None,
    vocab_size: int,
    facts: Mapping[str, object],
) -> None:
    """Write all files of a dataset beside its tokens.bin: arrays, tokenizer.json if given, and meta.json with `facts`.

    `sizes` counts the tokens of each sample. targets.bin, if present, has a byte for each token: 1 for a target.
    Without it all tokens from `first_target` on are targets. Of pairs of documents, `num_first` counts the tokens of
    each one's first. The fingerprint is the sha256 of tokens, arrays and
    tokenizer; the fingerprint of samples leaves out the tokenizer.

    Errors: DataError where the disk has no room.
    """
    copies = {"first_target": first_target, "task_ids": task_ids}
    copies |= {} if num_first is None else {FIRST_DOCUMENTS: num_first}
    arrays = _write_arrays(folder, sizes, copies)
    digest = _digest_samples(folder, arrays)
    for name, array in arrays.items():
        array.flush()
        assert name in (*ARRAYS, FIRST_DOCUMENTS)
    samples = digest.hexdigest()
    if tokenizer_json is not None:
        (folder / FILE_NAME).write_text(tokenizer_json, encoding="utf-8")
        digest.update(tokenizer_json.encode())
    meta = {
        "format": FORMAT,
        "fingerprint": digest.hexdigest(),
        "samples_fingerprint": samples,
        "num_samples": len(sizes),
        "num_tokens": int(np.sum(sizes, dtype=np.int64)),
        "dtype": dtype.str,
        "vocab_size": vocab_size,
        "tasks": list(tasks),
        **facts,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")


def _digest_samples(folder: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> Any:
    """The sha256 of a dataset's tokens, marks of targets and arrays, before it is finished."""
    digest = hashlib.sha256()
    for name in (TOKENS_FILE, TARGETS_FILE):
        if (folder / name).is_file():
            with (folder / name).open("rb") as file:
                while block := file.read(_READ_BYTES):
                    digest.update(block)
    for name in ("offsets", "first_target", "task_ids", FIRST_DOCUMENTS, "lengths"):
        for start in range(0, len(arrays[name]) if name in arrays else 0, _CHUNK_SAMPLES):
            digest.update(arrays[name][start : start + _CHUNK_SAMPLES].tobytes())
    return digest


def _write_arrays(
    folder: Path,
    sizes: npt.NDArray[np.int64],
    copies: Mapping[str, npt.NDArray[np.int32]],
) -> dict[str, np.memmap[Any, Any]]:
    """The arrays of a dataset as memory maps, filled in chunks, in the order in which the fingerprint takes them;
    `copies` are taken as they are."""
    has_mask = (folder / TARGETS_FILE).is_file()
    is_target = np.memmap(folder / TARGETS_FILE, np.uint8, "r") if has_mask else None
    num_samples = len(sizes)
    offsets = new_array(folder / "offsets.npy", np.int64, (num_samples + 1,))
    first_target, num_first = copies["first_target"], copies.get(FIRST_DOCUMENTS)
    lengths = new_array(folder / "lengths.npy", np.int64, (num_samples, 3 if num_first is None else 4))
    copied = {name: new_array(folder / f"{name}.npy", np.int32, (num_samples,)) for name in copies}
    end = 0
    for start in range(0, num_samples, _CHUNK_SAMPLES):
        part = slice(start, min(start + _CHUNK_SAMPLES, num_samples))
        size = np.asarray(sizes[part], np.int64)
        ends = end + np.cumsum(size)
        offsets[part.start + 1 : part.stop + 1] = ends
        if is_target is None:
            num_targets = size - first_target[part]
        else:
            num_targets = np.add.reduceat(is_target[end : ends[-1]], ends - size - end, dtype=np.int64)
        end = int(ends[-1])
        columns = [size - 1, np.zeros_like(size), num_targets]
        if num_first is not None:
            columns = [size - 2, *columns[1:], num_first[part].astype(np.int64) - 1]
        lengths[part] = np.stack(columns, axis=1)
        for name, source in copies.items():
            copied[name][part] = source[part]
    return {"offsets": offsets, **copied, "lengths": lengths}


def new_array(path: Path, dtype: type[np.generic], shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    """A new .npy file, mapped for writing, with its room on disk allocated. Errors: DataError where there is none.

    Without this allocation a full disk would end the process by SIGBUS at a later write.
    """
    try:
        array: np.memmap[Any, Any] = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    except OSError as error:
        move = writing_move(error.errno, "make room")
        raise DataError(f"{path} cannot be written ({error.strerror}): {move}, or choose another place") from None
    return array


TokenizerKind = Literal["bpe", "bytes"]
_BATCH_EXAMPLES = 1024
_LONGEST_END = 4  # tokens that end a text or a turn: <|im_end|> and a line's end, for example
_BLOCK_TOKENS = 1 << 22
_BATCH_CHARACTERS = 4 << 20


@dataclass(frozen=True, slots=True, eq=False)
class TokenSample:
    """One sample: int64 `tokens`, and the index of the first target token.

    `targets` marks the target tokens; with None all tokens from the first target on are targets. Of a pair of documents
    the first `num_first` tokens are the first one's; 0: it is one document. `references` are what the model that a run
    began with gives the targets of each document: sums of log probabilities.
    """

    index: int
    tokens: npt.NDArray[np.int64]
    first_target: int
    targets: npt.NDArray[np.bool_] | None = None
    num_first: int = 0
    references: tuple[float, float] | None = None

    @property
    def positions(self) -> int:
        """Model input positions. Of each document every token but the last is an input, all but the first labels."""
        return len(self.tokens) - (2 if self.num_first else 1)

    @property
    def target(self) -> int:
        """Number of labels that carry loss."""
        return int(np.count_nonzero(self.is_target))

    @property
    def is_target(self) -> npt.NDArray[np.bool_]:
        """Whether each token carries loss as a label."""
        return np.arange(len(self.tokens)) >= self.first_target if self.targets is None else self.targets


@dataclass(frozen=True, slots=True, eq=False)
class TokenDataset:
    """Prepared samples, memory-mapped: `dataset[i]` reads one, `dataset.lengths` is all that planning needs."""

    directory: Path
    meta: Mapping[str, object]
    lengths: LengthArray
    tokens: npt.NDArray[np.unsignedinteger[npt.NBitBase]]
    offsets: npt.NDArray[np.int64]
    first_target: npt.NDArray[np.int32]
    task_ids: npt.NDArray[np.int32]
    targets: npt.NDArray[np.uint8] | None = None
    num_first: npt.NDArray[np.int32] | None = None

    @staticmethod
    def open(directory: str | Path) -> TokenDataset:
        """The dataset that `prepare` wrote. Errors: DataError where it is missing, of another format, or cut short."""
        folder = Path(directory)
        meta = _read_meta(folder)
        try:
            has_pairs = (folder / f"{FIRST_DOCUMENTS}.npy").is_file()
            names = (*ARRAYS, *((FIRST_DOCUMENTS,) if has_pairs else ()))
            arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names}
            tokens = np.memmap(folder / TOKENS_FILE, dtype=np.dtype(str(meta["dtype"])), mode="r")
            has_mask = (folder / TARGETS_FILE).is_file()
            targets = np.memmap(folder / TARGETS_FILE, dtype=np.uint8, mode="r") if has_mask else None
        except NO_ARRAY as error:
            raise DataError(f"{folder} is damaged ({error}): remove it and prepare the data again") from None
        num_samples = int(str(meta["num_samples"]))
        lengths_shape = (num_samples, 4 if has_pairs else 3)
        shapes = dict.fromkeys(arrays, (num_samples,)) | {"offsets": (num_samples + 1,), "lengths": lengths_shape}
        if any(array.shape != shapes[name] or array.dtype.kind != "i" for name, array in arrays.items()):
            raise DataError(
                f"{folder} is damaged: its arrays do not hold {num_samples} samples: prepare the data again"
            )
        if len(tokens) != int(arrays["offsets"][-1]):
            raise DataError(
                f"{folder}/tokens.bin holds {len(tokens)} tokens but should hold {int(arrays['offsets'][-1])}: "
                "remove the folder and prepare the data again"
            )
        if targets is not None and len(targets) != len(tokens):
            raise DataError(
                f"{folder}/{TARGETS_FILE} is of {len(targets)} tokens but there are {len(tokens)}: remove the folder"
                " and prepare the data again"
            )
        return TokenDataset(directory=folder, meta=meta, tokens=tokens, targets=targets, **arrays)

    def verify(self) -> None:
        """Read all tokens and compare them with the fingerprint that meta.json has of them.

        It takes 0.5 s per GB with the instructions that most CPUs have for SHA-256. Errors: DataError for others.
        """
        arrays = {name: getattr(self, name) for name in (*ARRAYS, FIRST_DOCUMENTS)}
        digest = _digest_samples(self.directory, {name: one for name, one in arrays.items() if one is not None})
        saved = self.samples_fingerprint
        if saved is None:  # in older folders the fingerprint is of the tokenizer, too
            file = self.directory / FILE_NAME
            digest.update(file.read_bytes() if file.is_file() else b"")
        if digest.hexdigest() != (saved or self.fingerprint):
            raise DataError(
                f"{self.directory} is damaged: its tokens are not those that were prepared: remove it and prepare the"
                " data again"
            )

    def __reduce__(self) -> tuple[Callable[[Path], TokenDataset], tuple[Path]]:
        return TokenDataset.open, (self.directory,)  # a pickled memmap would take its whole file to each worker

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> TokenSample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside of the {len(self)} samples of {self.directory}")
        place = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        targets = None if self.targets is None else self.targets[place].astype(np.bool_)
        num_first = 0 if self.num_first is None else int(self.num_first[index])
        tokens = self.tokens[place].astype(np.int64)
        return TokenSample(int(index), tokens, int(self.first_target[index]), targets, num_first)

    @property
    def whole(self) -> TokenDataset:
        """This dataset; a `SampleSubset` returns the dataset that it is a part of."""
        return self

    @property
    def indices(self) -> npt.NDArray[np.int64]:
        """The indices of its samples within `whole`."""
        return np.arange(len(self))

    @property
    def fingerprint(self) -> str:
        """sha256 of everything that training reads: tokens, their borders, the tokenizer."""
        return str(self.meta["fingerprint"])

    @property
    def samples_fingerprint(self) -> str | None:
        """The fingerprint without the tokenizer, whose files may change while it makes the same tokens. None in older
        folders."""
        fingerprint = self.meta.get("samples_fingerprint")
        return fingerprint if isinstance(fingerprint, str) else None

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones included."""
        return int(str(self.meta["vocab_size"]))

    def sample_beyond(self, vocab_size: int) -> tuple[int, int] | None:
        """The first sample with an id of at least `vocab_size`, and that id; None if there is none. Reads all tokens,
        unless the tokenizer has no such id."""
        if self.vocab_size <= vocab_size:
            return None
        for start in range(0, len(self.tokens), _BLOCK_TOKENS):
            places = np.flatnonzero(self.tokens[start : start + _BLOCK_TOKENS] >= vocab_size)
            if len(places):
                place = start + int(places[0])
                return int(np.searchsorted(self.offsets, place, side="right")) - 1, int(self.tokens[place])
        return None

    @property
    def num_truncated(self) -> int:
        return int(str(self.meta["num_truncated"]))

    @property
    def file_sizes(self) -> tuple[int, ...]:
        """How many samples came from each source file, in order; empty where the folder does not record it."""
        sizes = self.meta.get("file_sizes")
        return tuple(sizes) if isinstance(sizes, list) else ()

    @property
    def template(self) -> str | None:
        """The template by which a model's own tokenizer read the records, None without one, "unknown" if not
        recorded."""
        records = self.meta.get("records")
        return str(records["template"] or "") or None if isinstance(records, dict) else "unknown"

    @property
    def loss_on(self) -> str:
        """On which answers of its chats loss falls: "answers" for all."""
        records = self.meta.get("records")
        return str(records.get("loss_on", "answers")) if isinstance(records, dict) else "answers"

    @property
    def record_fields(self) -> tuple[tuple[str, ...], str] | None:
        """The names of the fields of pairs and of texts in the records; None where the folder does not record them."""
        records = self.meta.get("records")
        return (tuple(records["pair"]), str(records["text"])) if isinstance(records, dict) else None

    @property
    def template_date(self) -> str:
        """The date that its tokenizer's chat template has written into chats; empty if it writes none."""
        return str(self.meta.get("template_date", ""))

    @property
    def unread_fields(self) -> tuple[str, ...]:
        """The fields of the records that hold their words, too, and were not read (`record_forms.unread_fields`)."""
        names = self.meta.get("unread_fields")
        return tuple(names) if isinstance(names, list) else ()

    @property
    def num_empty_targets(self) -> int:
        """Samples whose targets are all without words: an end of text alone, or a turn's end. 0 where the data came
        without a tokenizer."""
        if not (self.directory / FILE_NAME).is_file():
            return 0
        tokenizer, count = None, 0
        for num_targets in range(1, _LONGEST_END + 1):
            samples = np.flatnonzero(self.lengths[:, 2] == num_targets)
            if not len(samples):
                continue
            if self.targets is None:  # targets stand at the end
                targets = self.tokens[self.offsets[samples + 1][:, None] + np.arange(-num_targets, 0)]
            else:
                chats = (self[int(sample)] for sample in samples)
                targets = np.stack([chat.tokens[chat.is_target] for chat in chats])
            tokenizer = tokenizer or self.tokenizer()
            distinct, counts = np.unique(targets, axis=0, return_counts=True)
            empty = [not tokenizer.decode(row).strip() for row in distinct.tolist()]
            count += int(counts[np.array(empty)].sum())
        return count

    @property
    def tasks(self) -> tuple[str, ...]:
        """Task names, in the order that `task_ids` counts them."""
        names = self.meta["tasks"]
        assert isinstance(names, list)
        return tuple(names)

    def tokenizer(self) -> Encoder:
        """The tokenizer that made the data. Errors: DataError where the folder has none."""
        from dynapipe_ext.data.preprocessing.encoder_loading import encoder_from_json

        path = self.directory / FILE_NAME
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path} cannot be read ({error}): prepare the data again, with its tokenizer") from None
        return encoder_from_json(text)


def is_prepared(path: str | Path) -> bool:
    """Whether a path is a folder of prepared tokens."""
    return (Path(path) / "meta.json").is_file()


def refuse_other_content(folder: Path) -> None:
    """Errors: DataError for a place that holds anything but prepared data, which is never replaced; ConfigError for a
    path that does not name a folder.
    """
    if folder.name in ("", ".."):
        raise ConfigError(f"{str(folder)!r} names no new folder: give one to be made")
    if folder.exists() and not is_prepared(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} exists and is not prepared data: remove it or choose another folder")


def open_prepared(directory: str | Path, *, max_seq_len: int) -> TokenDataset:
    """The dataset in a prepared folder, for a model with rows of up to `max_seq_len` positions.

    Errors: DataError as for `TokenDataset.open`, and for a longer sample.
    """
    dataset = TokenDataset.open(directory)
    longest_documents = get_document_lengths(dataset.lengths).max(axis=1)
    longest = int(longest_documents.argmax())
    if longest_documents[longest] > max_seq_len:
        raise DataError(
            f"{directory}: sample {longest} has {longest_documents[longest]} tokens but max_seq_len is {max_seq_len}:"
            f" raise it, or prepare the data again with --max-seq-len {max_seq_len} --truncate"
        )
    return dataset


def fingerprint_of_source(source: str | Path | Mapping[str, object]) -> str:
    """sha256 of a source: of a file's path and `file_stamp`, or of a generator's settings."""
    if isinstance(source, Mapping):
        described: Mapping[str, object] = source
    else:
        path = Path(source)
        try:
            stamp = file_stamp(path)
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}): check the path given as --data") from None
        described = {"path": str(path.resolve()), "stamp": stamp}
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def prepare(
    examples: Callable[[], Iterable[Example]],
    directory: str | Path,
    *,
    tokenizer: TokenizerKind,
    max_seq_len: int,
    truncate: bool,
    tasks: TaskBounds | None = None,
    vocab_size: int | None = None,
    source_fingerprint: str | None = None,
    unread: Sequence[str] = (),
    progress: Callable[[int], None] | None = None,
) -> TokenDataset:
    """Tokenize `examples` into `directory`, or open the data that an earlier call with equal source and settings wrote.

    `examples` returns a fresh iterator at each call; BPE reads them twice, to train and to encode. `unread` are fields
    of the records that hold their words, too (`TokenDataset.unread_fields`). `progress` receives the number of finished
    samples after each batch. The folder appears whole or not at all, also in the place of an older dataset. With
    `truncate` a sample over `max_seq_len` positions loses the left end of its input, then the right end of its target
    with its eos. `tasks` bounds each side as well.

    Errors: DataError for a sample over `max_seq_len` without `truncate`, for no samples, or where `directory` holds
    something else; ConfigError for settings that cannot work.
    """
    folder = Path(directory)
    bounds = LengthBounds(max_seq_len, truncate, tasks or TaskBounds())
    settings = _settings(tokenizer, vocab_size, bounds)
    refuse_other_content(folder)
    if source_fingerprint is not None and (dataset := _reusable(folder, settings, source_fingerprint)):
        return dataset

    with appearing_whole(folder) as partial:
        if tokenizer == "bpe":
            assert vocab_size is not None
            texts = (text for example in examples() for text in (example.input, example.target) if text)
            encoder: Tokenizer = train_tokenizer(texts, vocab_size)
        else:
            encoder = BytesTokenizer()
        facts = {"source": source_fingerprint, "settings": settings, "unread_fields": list(unread)}
        _write(partial, examples(), encoder, Truncation(encoder, bounds), progress, facts)
    return TokenDataset.open(folder)


def _settings(tokenizer: TokenizerKind, vocab_size: int | None, bounds: LengthBounds) -> dict[str, object]:
    if tokenizer not in ("bpe", "bytes"):
        raise ConfigError(f'tokenizer is {tokenizer!r}: choose "bpe" or "bytes"')
    if tokenizer == "bpe" and vocab_size is None:
        raise ConfigError('tokenizer "bpe" needs a vocab_size, for example 1024')
    if bounds.max_seq_len is not None and bounds.max_seq_len < 1:
        raise ConfigError(f"max_seq_len is {bounds.max_seq_len} but must be at least 1")
    size = vocab_size if tokenizer == "bpe" else None  # bytes have one vocabulary: another size is the same data
    tasks = {"tasks": asdict(bounds.tasks)} if bounds.tasks.bind else {}
    cut = {"max_seq_len": bounds.max_seq_len, "truncate": bounds.truncate}
    return {"tokenizer": tokenizer, "vocab_size": size, **cut, **tasks}


def _reusable(folder: Path, settings: Mapping[str, object], source: str) -> TokenDataset | None:
    try:
        dataset = TokenDataset.open(folder)
    except DataError:
        return None
    return dataset if dataset.meta.get("source") == source and dataset.meta.get("settings") == settings else None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48


# The facts of meta.json that readers rely on.
_FACTS: Mapping[str, Callable[[object], bool]] = {
    "dtype": lambda value: value in ("<u2", "<u4"),
    "num_samples": _is_count,
    "num_truncated": _is_count,
    "vocab_size": _is_count,
    "fingerprint": lambda value: isinstance(value, str),
    "tasks": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
}


def _read_meta(folder: Path) -> dict[str, object]:
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{folder} holds no prepared data ({error}): prepare it first") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise DataError(f"{folder} is not data of format {FORMAT}: remove it and prepare the data again")
    wrong = [name for name, is_right in _FACTS.items() if not is_right(meta.get(name))]
    if wrong:
        raise DataError(
            f"{folder}/meta.json has {short(meta.get(wrong[0]))} as {wrong[0]!r}, which nothing writes: remove the"
            " folder and prepare the data again"
        )
    return meta


def _write(
    folder: Path,
    examples: Iterable[Example],
    tokenizer: Tokenizer,
    truncation: Truncation,
    progress: Callable[[int], None] | None,
    facts: Mapping[str, object],
) -> None:
    """All files; `facts` go into meta.json."""
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    sizes, first_targets, task_ids = [], [], []
    task_numbers: dict[str, int] = {}
    file_sizes: Counter[str] = Counter()
    num_samples = num_truncated = 0
    with (folder / TOKENS_FILE).open("wb") as file:
        for batch in _batches(examples):
            sequences = truncation.encode(batch, first_index=num_samples)
            file.write(np.concatenate([np.array(s.tokens, dtype=dtype) for s in sequences]).tobytes())
            sizes.append(np.array([len(s.tokens) for s in sequences], np.int64))
            first_targets.append(np.array([s.first_target for s in sequences], np.int32))
            task_ids.append(np.array([task_numbers.setdefault(e.task, len(task_numbers)) for e in batch], np.int32))
            file_sizes.update(example.file for example in batch)
            num_samples += len(batch)
            num_truncated += sum(s.truncated for s in sequences)
            if progress is not None:
                progress(num_samples)
    if num_samples == 0:
        raise DataError("the data has no samples: give a source with at least one")
    seal(
        folder,
        dtype=dtype,
        sizes=np.concatenate(sizes),
        first_target=np.concatenate(first_targets),
        task_ids=np.concatenate(task_ids),
        tasks=list(task_numbers),
        tokenizer_json=tokenizer.as_json(),
        vocab_size=tokenizer.vocab_size,
        facts={"num_truncated": num_truncated, "file_sizes": list(file_sizes.values()), **facts},
    )


def _batches(examples: Iterable[Example]) -> Iterator[list[Example]]:
    """Batches of examples, small enough to encode in bounded memory."""
    batch: list[Example] = []
    characters = 0
    for example in examples:
        batch.append(example)
        characters += len(example.input) + len(example.target)
        if len(batch) == _BATCH_EXAMPLES or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


@contextmanager
def appearing_whole(folder: Path) -> Iterator[Path]:
    """Inside, an empty folder beside `folder`, which takes its place at the end; after an error nothing of it stays."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    try:
        partial.chmod(0o755)
        yield partial
        move_into_place(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def move_into_place(partial: Path, folder: Path) -> None:
    """Rename `partial` to `folder`. An older dataset is moved aside first; open maps of it stay valid."""
    aside = partial.with_name(partial.name + ".old")
    try:
        replace_folder(partial, folder, aside)
    except OSError as error:
        raise DataError(
            f"{folder} could not be put in place ({error.strerror}): is another run preparing it?"
        ) from None

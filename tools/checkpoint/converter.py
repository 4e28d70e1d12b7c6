"""Any checkpoint to any format, a group of tensors at a time, under a name that counts only when all of it is there.

    SRC ──► reader ──► writer ──► DST.partial: pieces, one line of the journal each ──► (verify) ──► DST

A killed conversion leaves DST.partial. The same command goes on with the pieces that are missing; another source or
other options are refused.
"""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dynapipe_ext.errors import NO_ROOM, DataError, format_bytes
from dynapipe_ext.models.tensors import TensorGroup, tensor_groups
from dynapipe_ext.tools.checkpoint import journal as journals
from dynapipe_ext.tools.checkpoint.formats import (
    CheckpointPiece,
    CheckpointReader,
    CheckpointWriter,
    GroupTensors,
    StateKind,
    WriterOptions,
)
from dynapipe_ext.tools.checkpoint.huggingface.carried_files import CONFIG, settle_config
from dynapipe_ext.tools.checkpoint.journal import ConversionJournal, Finished, absolute
from dynapipe_ext.tools.checkpoint.recognition import Format, format_of, recognise
from dynapipe_ext.tools.console import say_loading

PieceKey = tuple[str, StateKind]  # a group's name, and what of it


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion that can begin: all that can be refused without reading tensors has been."""

    source: Path
    destination: Path
    source_format: Format
    target_format: Format
    reader: CheckpointReader
    writer: CheckpointWriter
    pieces: tuple[CheckpointPiece, ...]
    identity: Mapping[str, Any]  # what an unfinished one must agree in
    notices: tuple[str, ...]
    verify: bool

    @property
    def partial(self) -> Path:
        return journals.partial_folder(self.destination)

    @property
    def total_bytes(self) -> int:
        """Bytes of tensors that are read to write, and again to verify."""
        written = sum(_piece_bytes(self.reader, piece) for piece in self.pieces)
        return written + (2 * self.distinct_bytes if self.verify else 0)

    @property
    def distinct_bytes(self) -> int:
        """Bytes of all tensors that the destination will hold, each counted once."""
        return sum(_bytes(self.reader, group, kind) for group, kind in self.groups.values())

    @property
    def groups(self) -> dict[PieceKey, tuple[TensorGroup, StateKind]]:
        """What the destination will hold."""
        return {(group.name, kind): (group, kind) for piece in self.pieces for group, kind in piece.groups}


@dataclass(frozen=True, slots=True)
class ConversionOutcome:
    """What a conversion did."""

    num_tensors: int
    num_bytes: int
    num_pieces: int
    num_resumed: int
    verified: bool
    notices: tuple[str, ...]
    usage: tuple[str, ...]  # how what was written is loaded


def prepare_conversion(
    source: Path,
    destination: Path,
    target: str,
    options: WriterOptions,
    *,
    source_format: str = "",
    verify: bool = False,
    carry: Sequence[Path] | None = None,
    drop_mtp: bool = False,
    **own: Any,
) -> Conversion:
    """Check source, destination and options. `own` goes to the target's writer; `carry` are the files that go along
    with the weights, instead of those of the source. `drop_mtp` leaves out layers of multi-token prediction.

    Errors: ConfigError, DataError; nothing has been written then.
    """
    source, destination = absolute(source), absolute(destination)
    journals.refuse_places(destination, source)
    read_as, also = _source_format(source, source_format)
    written_as = format_of(target)
    say_loading("torch")  # not before: what is refused above needs none
    reader = read_as.open(source)
    changed = drop_mtp and reader.drop_prediction_layers()
    reader.check()
    if carry is not None:
        reader.files = tuple(carry)
    writer = written_as.new_writer(journals.partial_folder(destination), reader, options, **own)
    pieces = tuple(writer.pieces())
    _refuse_lost(reader, pieces)
    notices = [f"{source} could also be read as {', '.join(also)}: --from chooses"] if also else []
    if drop_mtp and not changed:
        notices.append(f"{source} has no layers of multi-token prediction: --drop-mtp changed nothing")
    notices += [*reader.notices, *writer.notices, *_left_out(reader, pieces, target)]
    identity = {
        "version": importlib.metadata.version("dynapipe-ext"),
        "source": str(source),
        "fingerprint": journals.source_fingerprint(source),
        "from": read_as.name,
        "to": target,
        **asdict(options),
        "layers_per_stage": list(options.layers_per_stage),
        **({"drop_mtp": True} if drop_mtp else {}),
        **own,
    }
    return Conversion(
        source, destination, read_as, written_as, reader, writer, pieces, identity, tuple(notices), verify
    )


def _source_format(source: Path, name: str) -> tuple[Format, tuple[str, ...]]:
    """The format of that name, or the one recognised and the names of others that it could be as well. Errors:
    DataError, ConfigError."""
    if name and not source.is_dir():
        raise DataError(f"{source} is no folder: give the folder of a checkpoint")
    formats = (format_of(name), ()) if name else recognise(source)
    if source.name.endswith(".partial") and (source / journals.NAME).exists():
        raise DataError(f"{source} is an unfinished conversion: run its command again first, then give what it makes")
    return formats


def convert(conversion: Conversion, advance: Callable[[int], None] = lambda num_bytes: None) -> ConversionOutcome:
    """Write the destination; `advance` hears of bytes done, `conversion.total_bytes` in all.

    Errors: DataError; what is done by then stays in the unfinished folder, and so it does when interrupted.
    """
    partial = conversion.partial
    with _said_plainly(partial), ConversionJournal(partial, conversion.identity) as journal:
        num_resumed = _resume(conversion, journal, advance)
        _refuse_no_room(conversion, journal)
        settled_files = journals.files_below(partial)
        for piece in conversion.pieces:
            if piece.name not in journal.finished:
                settled_files = _write(conversion, journal, piece, settled_files, advance)
        records = {piece.name: journal.finished[piece.name].record for piece in conversion.pieces}
        conversion.writer.finish(records)
        _settle_configs(conversion)
        for name in journals.files_below(partial) - settled_files:
            journals.settled(partial, name)
        if conversion.verify:
            verify_conversion(conversion, advance)
        journal.rename(conversion.destination)
    groups = conversion.groups.values()
    return ConversionOutcome(
        sum(len(group.tensors) for group, _ in groups),
        conversion.distinct_bytes,
        len(conversion.pieces),
        num_resumed,
        conversion.verify,
        conversion.notices,
        conversion.writer.usage,
    )


def verify_conversion(conversion: Conversion, advance: Callable[[int], None] = lambda num_bytes: None) -> None:
    """Read the written checkpoint back and compare every tensor with the source, by digests of all its bits. Files of
    torch.save must have the check sums that they were saved with.

    Errors: DataError naming every tensor that differs, or a file that is damaged.
    """
    from dynapipe_ext.tools.checkpoint.files.torch_file import checking_sums  # torch, which refusals need not

    with checking_sums():
        source = conversion.source_format.open(conversion.source)
        if conversion.identity.get("drop_mtp"):
            source.drop_prediction_layers()
        _compare(conversion, source, advance)


def _compare(conversion: Conversion, source: CheckpointReader, advance: Callable[[int], None]) -> None:
    written = conversion.target_format.open(conversion.partial)
    written.check()
    if tensor_groups(written.architecture) != tensor_groups(source.architecture):
        raise DataError(f"{conversion.partial} reads back as another model: {written.architecture}")
    faults = []
    for group, kind in conversion.groups.values():
        in_source = _digests(source.read(group, kind))
        advance(_bytes(source, group, kind))
        in_target = _digests(written.read(group, kind))
        advance(_bytes(source, group, kind))
        faults += [
            f"{name} ({kind})" for name in sorted(in_source | in_target) if in_source.get(name) != in_target.get(name)
        ]
    if faults:
        raise DataError(
            f"{conversion.partial} differs from {conversion.source} in {len(faults)} tensors: {', '.join(faults)}."
            " It is kept for a look and will not be used: remove it, check disk and memory, and convert again"
        )


def _write(
    conversion: Conversion,
    journal: ConversionJournal,
    piece: CheckpointPiece,
    settled_files: set[str],
    advance: Callable[[int], None],
) -> set[str]:
    """Writes a piece beside the files that are known; all that are there then."""
    read_keys: set[PieceKey] = set()

    def source(group: TensorGroup, kind: StateKind) -> GroupTensors:
        tensors = conversion.reader.read(group, kind)
        _refuse_other_types(conversion, group, kind, tensors)
        if (group.name, kind) not in read_keys:
            read_keys.add((group.name, kind))
            advance(_bytes(conversion.reader, group, kind))
        return tensors

    record = conversion.writer.write(piece, source)
    if lost := {(group.name, kind) for group, kind in piece.groups} - read_keys:
        raise DataError(
            f"{piece.name} was written without {', '.join(f'{name} ({kind})' for name, kind in sorted(lost))}"
        )
    all_files = journals.files_below(conversion.partial)
    files = {name: journals.settled(conversion.partial, name) for name in sorted(all_files - settled_files)}
    journal.add(piece.name, Finished(record, files))
    return all_files


def _resume(conversion: Conversion, journal: ConversionJournal, advance: Callable[[int], None]) -> int:
    """Keep the pieces that are whole and remove every other file; how many are kept."""
    by_name = {piece.name: piece for piece in conversion.pieces}
    for name, finished in list(journal.finished.items()):
        if name in by_name and journals.is_whole(conversion.partial, finished):
            advance(_piece_bytes(conversion.reader, by_name[name]))
        else:
            journal.forget(name)
    whole_files = {file for finished in journal.finished.values() for file in finished.files}
    for file in journals.files_below(conversion.partial) - whole_files:
        (conversion.partial / file).unlink()
    return len(journal.finished)


def _settle_configs(conversion: Conversion) -> None:
    """One config.json that says what the weights are: where the writer carried one, or beside what it wrote."""
    places = [conversion.partial / CONFIG, conversion.partial / "huggingface" / CONFIG]
    default = places[0] if conversion.target_format.name == "hf" else places[1]
    for place in {default, *(place for place in places if place.exists())}:
        settle_config(place, conversion.reader.architecture, conversion.reader.config_fields)


def _refuse_other_types(conversion: Conversion, group: TensorGroup, kind: StateKind, tensors: GroupTensors) -> None:
    """Refuse numbers that no model is made of, and another type than the target was planned for. Raises DataError."""
    expected = conversion.reader.dtype(group, kind)
    for name, tensor in tensors.items():
        if not tensor.dtype.is_floating_point or tensor.dtype != expected:
            others = "a float type" if not expected.is_floating_point else f"{expected}, as those beside it"
            raise DataError(
                f"{conversion.source}: {name} ({kind}) is {tensor.dtype} but must be {others}: copy it again, or save"
                " it anew"
            )


def _refuse_lost(reader: CheckpointReader, pieces: Sequence[CheckpointPiece]) -> None:
    """Errors: DataError where a writer plans to leave out a tensor."""
    planned = {group.name for piece in pieces for group, kind in piece.groups if kind == "weight"}
    if lost := [group.name for group in tensor_groups(reader.architecture) if group.name not in planned]:
        raise DataError(f"the target has no place for {', '.join(lost)}: this is a defect, please report it")


def _refuse_no_room(conversion: Conversion, journal: ConversionJournal) -> None:
    done = sum(num_bytes for finished in journal.finished.values() for num_bytes, _ in finished.files.values())
    needed, free = conversion.distinct_bytes - done, shutil.disk_usage(conversion.partial).free
    if needed > free:
        raise DataError(
            f"{conversion.partial} needs {format_bytes(needed)} more, but its disk has {format_bytes(free)}: free some"
            " and run the same command again, or choose another DST"
        )


def _left_out(reader: CheckpointReader, pieces: Sequence[CheckpointPiece], target: str) -> Iterator[str]:
    written = {kind for piece in pieces for _, kind in piece.groups}
    wide = all(str(reader.dtype(group, "weight")) == "torch.float32" for group in tensor_groups(reader.architecture))
    copies = {"master"} if wide and "exp_avg" in written else set()  # what fp32 weights are themselves
    left = [kind for kind in reader.kinds if kind not in written | copies]
    if left:
        yield f"optimizer state is not carried to {target}: {', '.join(left)} stay behind"
    if target == "hf" and reader.state is not None and reader.state.iteration:
        yield f"the place in training (iteration {reader.state.iteration:,}) is not carried: {target} has none"


@contextmanager
def _said_plainly(partial: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as raised:
        error = raised if isinstance(raised, OSError) else raised.__context__  # torch.save hides it behind its own
        if not isinstance(error, OSError):
            raise
        where = error.filename2 or error.filename or partial  # of a copy: where to
        if error.errno in NO_ROOM:
            raise DataError(
                f"{where} cannot be written, the disk or the quota is full ({error.strerror}): free some space and run"
                f" the same command again: it goes on with {partial}"
            ) from error
        raise DataError(
            f"{where} cannot be used ({error.strerror or error}): check the folder and its rights, then run the same"
            " command again"
        ) from error


def _digests(tensors: GroupTensors) -> dict[str, str]:
    from dynapipe_ext.tools.checkpoint.files.stored_tensor import tensor_digest  # torch, which refusals need not

    return {name: tensor_digest(tensor) for name, tensor in tensors.items()}


def _bytes(reader: CheckpointReader, group: TensorGroup, kind: StateKind) -> int:
    return group.size * reader.dtype(group, kind).itemsize


def _piece_bytes(reader: CheckpointReader, piece: CheckpointPiece) -> int:
    return sum(_bytes(reader, group, kind) for group, kind in piece.groups)

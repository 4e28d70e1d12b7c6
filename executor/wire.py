"""An ExecutionPlan as signed bytes, and back.

Layout: 4 bytes `DYNX`, 1 byte version, 32 bytes HMAC-SHA256, then zlib-compressed JSON arrays. The HMAC covers the
first five bytes, the `context` and the compressed body. It is checked before anything is unpacked. The context is the
name under which the bytes are stored, so that a plan cannot pass for another step's. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import operator
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dynapipe_ext.batch.micro_batches import MicroBatch, SampleLength
from dynapipe_ext.batch.topology import TensorSpec
from dynapipe_ext.core import native
from dynapipe_ext.errors import ConfigError, StoreError
from dynapipe_ext.executor.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Buffer,
    ExecutionPlan,
    Forward,
    Instruction,
    Load,
    Payload,
    Program,
    Recv,
    Send,
    WaitRecv,
    WaitSend,
)
from dynapipe_ext.schedules.step_plan import Prediction

VERSION = 2
MAX_PLAN_BYTES = 256 << 20  # of unpacked JSON: a bound for zlib, far above any plan (a million samples take 30 MB)
MIN_KEY_BYTES = 16

_MAGIC = b"DYNX"
_MAC_BYTES = hashlib.sha256().digest_size
_PREFIX_BYTES = len(_MAGIC) + 1


def encode(plan: ExecutionPlan, key: bytes, *, context: bytes = b"") -> bytes:
    """The plan as bytes that only holders of `key` can make; the same plan gives the same bytes.

    Errors: ConfigError for a key of under 16 bytes.
    """
    (data,) = encode_all([plan], key, contexts=[context])
    return data


def encode_all(plans: Iterable[ExecutionPlan], key: bytes, *, contexts: Iterable[bytes]) -> Iterator[bytes]:
    """Each plan as `encode` has it; ranks of one replica share their micro-batches, which are written out once."""
    micro_batches: tuple[MicroBatch, ...] | None = None
    for plan, context in zip(plans, contexts, strict=True):
        if plan.micro_batches is not micro_batches:
            micro_batches = plan.micro_batches
            written = _json([_micro_batch_row(micro_batch) for micro_batch in micro_batches])
        yield sealed(_to_json(plan, written), key, context=context)


def decode(data: bytes, key: bytes, *, context: bytes = b"") -> ExecutionPlan:
    """The plan in `data`. Raises StoreError for bytes of another key, context or version, or that were changed."""
    body = unseal(data, key, context=context)
    try:
        return _from_json(body)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise StoreError(
            f"signed plan of {len(data)} B does not have the fields of wire version {VERSION} ({error}):"
            " run the same dynapipe-ext release on planners and ranks"
        ) from error


def sealed(body: bytes, key: bytes, *, context: bytes = b"") -> bytes:
    """`body` compressed and signed."""
    _check_key(key)
    head = _MAGIC + bytes([VERSION])
    packed = zlib.compress(body, 1)
    return head + _mac(key, head, context, packed) + packed


def unseal(data: bytes, key: bytes, *, context: bytes = b"") -> bytes:
    """What `sealed` was given. Raises StoreError, before it unpacks anything, unless key, context and version match."""
    _check_key(key)
    if len(data) > MAX_PLAN_BYTES:
        raise StoreError(f"{len(data)} B from the store{_named(context)} are more than a plan's {MAX_PLAN_BYTES} B")
    head, mac, packed = data[:_PREFIX_BYTES], data[_PREFIX_BYTES:][:_MAC_BYTES], data[_PREFIX_BYTES + _MAC_BYTES :]
    if len(mac) < _MAC_BYTES or not head.startswith(_MAGIC):
        raise StoreError(f"{len(data)} B from the store are not a plan: is another program using this namespace?")
    if head[-1] != VERSION:
        raise StoreError(
            f"plan has wire version {head[-1]} but this process reads {VERSION}:"
            " run the same dynapipe-ext release on planners and ranks"
        )
    if not hmac.compare_digest(mac, _mac(key, head, context, packed)):
        raise StoreError(
            f"plan of {len(data)} B{_named(context)} does not carry this job's signature (changed, truncated, or signed"
            " with another key): give all processes of the job the same plan key and a namespace of their own"
        )
    inflate = zlib.decompressobj()
    try:
        body = inflate.decompress(packed, MAX_PLAN_BYTES)
    except zlib.error as error:
        raise StoreError(f"signed plan{_named(context)} cannot be unpacked: {error}") from error
    if not inflate.eof:
        raise StoreError(f"signed plan{_named(context)} is incomplete or unpacks to more than {MAX_PLAN_BYTES} B")
    return body


def _named(context: bytes) -> str:
    return f" at {context.decode(errors='replace')!r}" if context else ""


def _check_key(key: bytes) -> None:
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"the plan key has {len(key)} bytes: give at least {MIN_KEY_BYTES} random ones")


def _mac(key: bytes, head: bytes, context: bytes, packed: bytes) -> bytes:
    mac = hmac.new(key, head, hashlib.sha256)
    mac.update(struct.pack(">Q", len(context)))
    mac.update(context)
    mac.update(packed)
    return mac.digest()


def _to_json(plan: ExecutionPlan, micro_batches: str) -> bytes:
    instructions, tables = _instructions_text(plan.instructions)
    prediction = plan.prediction
    place = [plan.step, plan.dp_rank, plan.pp_rank, plan.stage_ranks, *([plan.width] if plan.width > 1 else [])]
    rest = [
        [[[spec.shape, spec.dtype] for spec in specs] for specs in tables],
        [prediction.makespan_ns, prediction.lower_bound_ns, prediction.peak_bytes, prediction.bubble_ratio],
        [plan.loss_norm, plan.loss_weight, plan.real_tokens, plan.padded_tokens, plan.num_micro_batches, plan.seed],
        plan.forward_only,
    ]
    return f"[{_json(place)},{micro_batches},[{instructions}],{_json(rest)[1:]}".encode()


def _json(value: Any) -> str:
    # default: NumPy integers, which arithmetic on length arrays leaves behind, are written as integers.
    return json.dumps(value, separators=(",", ":"), allow_nan=False, default=operator.index)


def _from_json(body: bytes) -> ExecutionPlan:
    place, micro_batches, instructions, tables, prediction, totals, forward_only = json.loads(body)
    step, dp_rank, pp_rank, stage_ranks, *width = place
    makespan_ns, lower_bound_ns, peak_bytes, bubble_ratio = prediction
    loss_norm, loss_weight, real_tokens, padded_tokens, num_micro_batches, seed = totals
    specs = tuple(tuple(TensorSpec(tuple(shape), dtype) for shape, dtype in table) for table in tables)
    return ExecutionPlan(
        step=step,
        dp_rank=dp_rank,
        pp_rank=pp_rank,
        stage_ranks=tuple(stage_ranks),
        micro_batches=tuple(_micro_batch(row) for row in micro_batches),
        instructions=tuple(_instruction(row, specs) for row in instructions),
        prediction=Prediction(
            makespan_ns=makespan_ns,
            lower_bound_ns=lower_bound_ns,
            peak_bytes=tuple(peak_bytes),
            bubble_ratio=bubble_ratio,
        ),
        loss_norm=loss_norm,
        loss_weight=loss_weight,
        real_tokens=real_tokens,
        padded_tokens=padded_tokens,
        num_micro_batches=tuple(num_micro_batches),
        seed=seed,
        forward_only=forward_only,
        width=width[0] if width else 1,
    )


def _micro_batch_row(micro_batch: MicroBatch) -> list[Any]:
    """Columns of samples compress better than rows: decoder, target and start are often constant. One more of pairs of
    documents, the positions of their first."""
    samples = micro_batch.samples
    return [
        [s.index for s in samples],
        [s.encoder for s in samples],
        [s.decoder for s in samples],
        [s.target for s in samples],
        [s.start for s in samples],
        micro_batch.layout,
        micro_batch.recompute,
        micro_batch.attention,
        micro_batch.pad_multiple,
        micro_batch.min_len,
        *([[s.first for s in samples]] if any(s.first for s in samples) else []),
    ]


def _micro_batch(row: list[Any]) -> MicroBatch:
    index, encoder, decoder, target, start, layout, recompute, attention, pad_multiple, min_len, *pairs = row
    firsts = pairs[0] if pairs else [0] * len(index)
    samples = tuple(map(SampleLength, index, encoder, decoder, target, start, firsts))
    return MicroBatch(samples, layout, recompute, attention, pad_multiple, min_len)


def _instructions_text(instructions: Sequence[Instruction]) -> tuple[str, Iterable[tuple[TensorSpec, ...]]]:
    """Return their JSON, and the specs that it names by their places."""
    program = instructions if isinstance(instructions, Program) else Program.of(instructions)
    text, order = native.program_text(program.table, len(program.specs))
    return text, [program.specs[place] for place in order]


def _instruction(row: list[Any], tables: tuple[tuple[TensorSpec, ...], ...]) -> Instruction:
    match row:
        case ["L", micro_batch]:
            return Load(micro_batch)
        case ["F", stage, micro_batch]:
            return Forward(stage, micro_batch)
        case ["B", stage, micro_batch]:
            return Backward(stage, micro_batch)
        case ["I", stage, micro_batch]:
            return BackwardInput(stage, micro_batch)
        case ["W", stage, micro_batch]:
            return BackwardWeight(stage, micro_batch)
        case ["S", payload, stage, micro_batch, peer, channel, specs]:
            return Send(_buffer(payload, stage, micro_batch), peer, channel, tables[specs])
        case ["R", payload, stage, micro_batch, peer, channel, specs]:
            return Recv(_buffer(payload, stage, micro_batch), peer, channel, tables[specs])
        case ["s", payload, stage, micro_batch]:
            return WaitSend(_buffer(payload, stage, micro_batch))
        case ["r", payload, stage, micro_batch]:
            return WaitRecv(_buffer(payload, stage, micro_batch))
        case _:
            raise ValueError(f"no instruction is written as {row!r}")


_PAYLOADS: dict[str, Payload] = {"a": "activation", "g": "gradient"}


def _buffer(payload: str, stage: int, micro_batch: int) -> Buffer:
    return Buffer(_PAYLOADS[payload], stage, micro_batch)

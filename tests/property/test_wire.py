"""Plans as bytes: nothing is lost on the way, and nothing that was not signed gets in."""

from __future__ import annotations

import hashlib
import hmac
import json
import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynapipe_ext.batch.micro_batches import ALL_RECOMPUTES, MicroBatch, SampleLength
from dynapipe_ext.batch.topology import TensorSpec
from dynapipe_ext.errors import ConfigError, StoreError
from dynapipe_ext.executor import wire
from dynapipe_ext.executor.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Buffer,
    ExecutionPlan,
    Forward,
    Instruction,
    Load,
    Recv,
    Send,
    WaitRecv,
    WaitSend,
)
from dynapipe_ext.schedules.step_plan import Prediction

KEY = b"k" * 32
counts = st.integers(0, 2**40)
small = st.integers(0, 300)
samples = st.builds(SampleLength, counts, st.integers(1, 1 << 20), small, small, counts)
micro_batches = st.builds(
    MicroBatch,
    st.lists(samples, max_size=6).map(tuple),
    st.sampled_from(["padded", "packed"]),
    st.sampled_from(ALL_RECOMPUTES),
    st.sampled_from(["document", "row"]),
    st.integers(1, 64),
    small,
)
specs = st.lists(
    st.builds(TensorSpec, st.lists(small, max_size=4).map(tuple), st.sampled_from(["float32", "bfloat16"])), max_size=3
).map(tuple)
buffers = st.builds(Buffer, st.sampled_from(["activation", "gradient"]), small, small)
of_kind = {
    Load: st.builds(Load, small),
    Forward: st.builds(Forward, small, small),
    Backward: st.builds(Backward, small, small),
    BackwardInput: st.builds(BackwardInput, small, small),
    BackwardWeight: st.builds(BackwardWeight, small, small),
    Send: st.builds(Send, buffers, small, small, specs),
    Recv: st.builds(Recv, buffers, small, small, specs),
    WaitSend: st.builds(WaitSend, buffers),
    WaitRecv: st.builds(WaitRecv, buffers),
}
plans = st.builds(
    ExecutionPlan,
    step=counts,
    dp_rank=small,
    pp_rank=small,
    stage_ranks=st.lists(small, max_size=8).map(tuple),
    micro_batches=st.lists(micro_batches, max_size=6).map(tuple),
    instructions=st.lists(st.one_of(*of_kind.values()), max_size=40).map(tuple),
    prediction=st.builds(
        Prediction,
        makespan_ns=counts,
        lower_bound_ns=counts,
        peak_bytes=st.lists(counts, max_size=8).map(tuple),
        bubble_ratio=st.floats(allow_nan=False, allow_infinity=False),
    ),
    loss_norm=st.sampled_from(["tokens", "samples"]),
    loss_weight=counts,
    real_tokens=counts,
    padded_tokens=counts,
    num_micro_batches=st.lists(small, max_size=8).map(tuple),
    seed=st.integers(-(2**70), 2**70),
    forward_only=st.booleans(),
    width=st.sampled_from((1, 2, 8)),
)


def example_plan(num_micro_batches: int = 3, rows: int = 2) -> ExecutionPlan:
    """One rank in the middle of a linear pipeline, forwards then backwards."""
    group = tuple(
        MicroBatch(tuple(SampleLength(97 * m + r, 50 + m + r, 0, 20 + r) for r in range(rows)))
        for m in range(num_micro_batches)
    )
    program: list[Instruction] = []
    for m, micro_batch in enumerate(group):
        spec = (TensorSpec((micro_batch.encoder_len, rows, 1024)),)
        arrives, leaves = Buffer("activation", 0, m), Buffer("activation", 1, m)
        program += [Load(m), Recv(arrives, 0, 0, spec), WaitRecv(arrives), Forward(1, m), Send(leaves, 2, 0, spec)]
        program += [WaitSend(leaves)]
    for m, micro_batch in enumerate(group):
        spec = (TensorSpec((micro_batch.encoder_len, rows, 1024)),)
        arrives, leaves = Buffer("gradient", 2, m), Buffer("gradient", 1, m)
        program += [Recv(arrives, 2, 1, spec), WaitRecv(arrives), Backward(1, m), Send(leaves, 0, 1, spec)]
        program += [WaitSend(leaves)]
    return ExecutionPlan(
        step=5,
        dp_rank=0,
        pp_rank=1,
        stage_ranks=(0, 1, 2, 3),
        micro_batches=group,
        instructions=tuple(program),
        prediction=Prediction(makespan_ns=10, lower_bound_ns=9, peak_bytes=(1, 2, 3, 4), bubble_ratio=0.25),
        loss_norm="tokens",
        loss_weight=100,
        real_tokens=100,
        padded_tokens=120,
        num_micro_batches=(num_micro_batches,),
        seed=0,
    )


@settings(max_examples=60)
@given(plans)
def test_any_plan_comes_back_equal(plan: ExecutionPlan) -> None:
    assert wire.decode(wire.encode(plan, KEY, context=b"a"), KEY, context=b"a") == plan


def test_a_plan_of_width_1_is_written_as_before_widths_were_known() -> None:
    place, *_ = json.loads(wire.unseal(wire.encode(example_plan(), KEY), KEY))
    assert place == [5, 0, 1, [0, 1, 2, 3]]


def test_a_plan_says_what_it_promises_in_seconds_bytes_and_shares() -> None:
    plan = example_plan()
    promised = (plan.makespan_s, plan.lower_bound_s, plan.peak_bytes, plan.padding_efficiency)
    assert promised == (10e-9, 9e-9, 4, 100 / 120)


def test_the_round_trip_covers_every_instruction() -> None:
    assert set(of_kind) == set(get_args(Instruction))


def test_one_plan_has_one_encoding() -> None:
    assert wire.encode(example_plan(), KEY) == wire.encode(example_plan(), KEY)


def test_ranks_that_share_micro_batches_are_written_as_each_by_itself() -> None:
    plan = example_plan()
    several = [plan, replace(plan, pp_rank=plan.pp_rank + 1), replace(plan, micro_batches=plan.micro_batches[:1]), plan]
    contexts = [b"a", b"b", b"c", b"d"]
    alone = [wire.encode(one, KEY, context=context) for one, context in zip(several, contexts, strict=True)]
    assert list(wire.encode_all(several, KEY, contexts=contexts)) == alone


@pytest.mark.parametrize("flip", [0x01, 0x80])
def test_a_change_of_any_byte_is_refused(flip: int) -> None:
    data = wire.encode(example_plan(), KEY)
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= flip
        with pytest.raises(StoreError):
            wire.decode(bytes(changed), KEY)


def test_truncated_lengthened_and_foreign_bytes_are_refused() -> None:
    data = wire.encode(example_plan(), KEY)
    for length in range(len(data)):
        with pytest.raises(StoreError):
            wire.decode(data[:length], KEY)
    for other in (data + b"\0", b"", b"\x80\x04K\x01.", b"x" * 1000):
        with pytest.raises(StoreError):
            wire.decode(other, KEY)


@pytest.mark.parametrize(
    ("key", "context", "version", "message"),
    [
        (b"j" * 32, b"", 0, "same plan key"),
        (KEY, b"plan/0/2/0/0", 0, "plan/0/2/0/0"),
        (KEY, b"plan/0/1/0/0", 9, f"version 9 but this process reads {wire.VERSION}"),
    ],
)
def test_a_plan_of_another_key_name_or_version_is_refused_with_what_to_do(
    key: bytes, context: bytes, version: int, message: str
) -> None:
    data = bytearray(wire.encode(example_plan(), KEY, context=b"plan/0/1/0/0"))
    data[4] = version or data[4]
    with pytest.raises(StoreError, match=message):
        wire.decode(bytes(data), key, context=context)


def test_the_signature_is_checked_before_anything_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("unpacked")

    data = wire.encode(example_plan(), KEY)
    monkeypatch.setattr(wire.zlib, "decompressobj", never)
    with pytest.raises(StoreError):
        wire.decode(data[:-1] + b"\0", KEY)


def test_ten_thousand_strange_messages_are_refused_by_name() -> None:
    """Random bytes, pieces of genuine plans changed, cut, joined and repeated, heads of ours on bodies of anybody's."""
    rng = random.Random(0)
    names = [f"plan/0/{step}/0/0".encode() for step in range(4)]
    genuine = {name: wire.encode(example_plan(count), KEY, context=name) for count, name in enumerate(names, 1)}

    foreign = wire.encode(example_plan(), b"j" * 32, context=names[0])

    def changed(data: bytes) -> bytes:
        bits = bytearray(data)
        for _ in range(rng.randint(1, 20)):
            bits[rng.randrange(len(bits))] ^= rng.randint(1, 255)
        return bytes(bits) if bytes(bits) != data else foreign

    ways: list[Callable[[bytes], bytes]] = [
        lambda data: rng.randbytes(rng.randrange(2000)),
        lambda data: data[:5] + rng.randbytes(rng.randrange(2000)),
        lambda data: data[:37] + zlib.compress(rng.randbytes(rng.randrange(500)), 1),
        lambda data: data[: rng.randrange(len(data))],
        lambda data: data[: rng.randrange(len(data))] + genuine[rng.choice(names)] + b"\0",
        lambda data: data * rng.randint(2, 5),
        changed,
        lambda data: foreign,
    ]

    for _ in range(10_000):
        name = rng.choice(names)
        with pytest.raises(StoreError):
            wire.decode(rng.choice(ways)(genuine[name]), KEY, context=name)
    assert all(wire.decode(data, KEY, context=name).step == 5 for name, data in genuine.items())


def test_a_message_above_the_bound_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    data = wire.encode(example_plan(), KEY)
    monkeypatch.setattr(wire, "MAX_PLAN_BYTES", len(data) - 1)
    with pytest.raises(StoreError, match=f"{len(data)} B from the store are more than a plan's {len(data) - 1} B"):
        wire.decode(data, KEY)


def signed(packed: bytes) -> bytes:
    """A message with a right signature, whatever is inside."""
    head = b"DYNX" + bytes([wire.VERSION])
    return head + hmac.new(KEY, head + struct.pack(">Q", 0) + packed, hashlib.sha256).digest() + packed


def test_a_signed_bomb_is_not_inflated_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_PLAN_BYTES", 1000)
    assert wire.unseal(signed(zlib.compress(b"0" * 1000)), KEY) == b"0" * 1000
    with pytest.raises(StoreError, match="more than 1000 B"):
        wire.decode(signed(zlib.compress(b"0" * 1001)), KEY)


@pytest.mark.parametrize(
    "body", [b"[]", b"{}", b"nonsense", b'[[0,0,0,[]],[],[["Q",1]],[],[1,1,[1],0],["tokens",1,1,1,[],0],false]']
)
def test_signed_bytes_that_are_not_a_plan_are_a_store_error(body: bytes) -> None:
    with pytest.raises(StoreError, match="same dynapipe-ext release"):
        wire.decode(signed(zlib.compress(body)), KEY)


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="15 bytes"):
        wire.encode(example_plan(), b"k" * 15)


def test_numpy_integers_are_written_as_integers() -> None:
    plan = example_plan()
    counted = ExecutionPlan(
        **{name: getattr(plan, name) for name in ExecutionPlan.__slots__} | {"real_tokens": np.int64(100)}
    )
    assert wire.decode(wire.encode(counted, KEY), KEY) == plan


def test_a_plan_of_32_micro_batches_takes_less_than_10_kilobytes() -> None:
    assert len(wire.encode(example_plan(num_micro_batches=32, rows=10), KEY)) < 10_000

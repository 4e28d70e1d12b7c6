"""What every Transport promises: order, content, sends that wait for their receives, waits that end and say why."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dynapipe_ext.batch.topology import TensorSpec, Topology
from dynapipe_ext.errors import ExecutionError
from dynapipe_ext.executor.instructions import Buffer, Recv, Send
from dynapipe_ext.executor.transport.inline import InlineHub
from dynapipe_ext.executor.transport.strict import StrictTransport
from dynapipe_ext.executor.transport.torch_p2p import TorchP2PTransport, make_pipeline_groups
from tests.bench.process_groups import pipeline_groups
from tests.support.limits import SOON_S

PAIR = Topology(pp=2)
LIMIT_S = 4.0


def operation(kind, micro_batch, peer, *, channel=0, shape=(3, 2), payload="activation", stage=0):
    return kind(Buffer(payload, stage, micro_batch), peer, channel, (TensorSpec(shape),))


def filled(micro_batch, shape=(3, 2)):
    return (torch.full(shape, float(micro_batch)),)


def outcome(main, transport):
    """A rank's result, or the message of its ExecutionError."""
    try:
        return main(transport)
    except ExecutionError as error:
        return f"error: {error}"


@pytest.fixture(params=["inline", "torch_p2p", "strict"])
def run_pair(request, run_ranks):
    """`run_pair(first, second)` runs one function a rank over the transport and returns both results."""

    def inline(first, second):
        hub, results = InlineHub(timeout_s=LIMIT_S), {}

        def rank(index, main):
            results[index] = outcome(main, hub.transport(index))

        threads = [threading.Thread(target=rank, args=(i, main)) for i, main in enumerate((first, second))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return [results[0], results[1]]

    def processes(first, second):
        def main(env):
            limit = timedelta(seconds=30)
            dist.init_process_group("gloo", env.init_method, rank=env.rank, world_size=2, timeout=limit)
            groups = make_pipeline_groups(PAIR, env.rank, timeout_s=30)
            if request.param == "strict":
                transport = StrictTransport(PAIR, env.rank, groups, timeout_s=LIMIT_S)
            else:
                cpu = torch.device("cpu")
                transport = TorchP2PTransport(PAIR, env.rank, groups, device=cpu, timeout_s=LIMIT_S)
            result = outcome((first, second)[env.rank], transport)
            dist.barrier()  # on the world's group: nobody leaves while the other still tries
            return result

        return run_ranks(2, main)

    run = inline if request.param == "inline" else processes
    run.kind = request.param
    return run


def test_buffers_arrive_whole_and_in_order(run_pair):
    shapes = [(3, 2), (1, 5), (400, 300)]

    def first(transport):
        pending = [
            transport.send(operation(Send, m, 1, shape=shape), filled(m, shape)) for m, shape in enumerate(shapes)
        ]
        return [p.wait() for p in pending]

    def second(transport):
        pending = [transport.recv(operation(Recv, m, 0, shape=shape)) for m, shape in enumerate(shapes)]
        received = [p.wait()[0] for p in reversed(pending)][::-1]  # waited for in another order than posted
        return [(tuple(x.shape), float(x.mean())) for x in received]

    sent, received = run_pair(first, second)
    assert sent == [(), (), ()]
    assert received == [(shape, float(m)) for m, shape in enumerate(shapes)]


def test_both_directions_run_at_once_on_their_own_communicators(run_pair):
    def rank(me):
        def main(transport):
            up, down = ("activation", 0), ("gradient", 1)
            (mine, theirs) = (up, down) if me == 0 else (down, up)
            send = operation(Send, 7, 1 - me, channel=me, payload=mine[0], stage=mine[1])
            recv = operation(Recv, 7, 1 - me, channel=1 - me, payload=theirs[0], stage=theirs[1])
            sending, receiving = transport.send(send, filled(me + 1)), transport.recv(recv)
            received = float(receiving.wait()[0].mean())
            sending.wait()
            return received

        return main

    results = run_pair(rank(0), rank(1))
    if run_pair.kind == "strict":  # each rank runs one at a time, and both begin with their own send
        assert all(str(r).startswith("error: ") for r in results)
    else:
        assert results == [2.0, 1.0]


def test_a_receive_that_nobody_sends_ends_with_both_names(run_pair):
    results = run_pair(lambda _: None, lambda t: t.recv(operation(Recv, 5, 0)).wait())
    assert results[0] is None
    assert "rank 1" in results[1]
    assert "rank 0" in results[1]
    assert "activation of micro-batch 5" in results[1]
    assert "limit 4 s" in results[1]


def test_a_transfer_that_cannot_begin_since_the_peer_is_gone_says_which(run_ranks):
    def main(env):
        dist.init_process_group("gloo", env.init_method, rank=env.rank, world_size=2, timeout=timedelta(seconds=30))
        groups = make_pipeline_groups(PAIR, env.rank, timeout_s=30)
        transport = TorchP2PTransport(PAIR, env.rank, groups, device=torch.device("cpu"), timeout_s=30)
        if env.rank == 0:
            transport.send(operation(Send, 0, 1), filled(0)).wait()
            return []
        transport.recv(operation(Recv, 0, 0)).wait()
        deadline_s = time.monotonic() + SOON_S

        def begin(transfer):  # until the closed connection is seen: what begins before fails later
            pending = []
            while time.monotonic() < deadline_s:
                pending.append(transfer())

        return [
            outcome(lambda t: begin(lambda: t.send(operation(Send, 5, 0, channel=1), filled(5))), transport),
            outcome(lambda t: begin(lambda: t.recv(operation(Recv, 5, 0))), transport),
        ]

    sent, received = run_ranks(2, main)[1]
    assert "waited for rank 0 to take the activation of micro-batch 5" in sent
    assert "waited for rank 0 to send the activation of micro-batch 5" in received


def test_a_send_of_another_shape_than_the_plan_says_is_refused_before_it_leaves(run_pair):
    if run_pair.kind == "inline":
        pytest.skip("inline buffers are opaque: no tensor library looks at them")
    results = run_pair(lambda t: t.send(operation(Send, 0, 1), filled(0, (9, 9))), lambda _: None)
    assert "(9, 9)" in results[0]
    assert "(3, 2)" in results[0]


def test_ranks_that_disagree_on_the_order_are_told_so(run_pair):
    if run_pair.kind == "torch_p2p":
        pytest.skip("gloo and NCCL have no tags: the static proof and the strict transport are there for this")

    def first(transport):
        pending = [transport.send(operation(Send, m, 1), filled(m)) for m in (0, 1)]
        return [p.wait() for p in pending]

    def second(transport):
        pending = [transport.recv(operation(Recv, m, 0)) for m in (1, 0)]
        return [p.wait() for p in pending]

    results = run_pair(first, second)
    assert any("micro-batch 0" in str(r) and "micro-batch 1" in str(r) for r in results)


def test_a_send_waits_for_its_receive(run_pair):
    if run_pair.kind == "torch_p2p":
        pytest.skip("gloo buffers what it sends")
    results = run_pair(lambda t: t.send(operation(Send, 3, 1), filled(3)).wait(), lambda _: None)
    assert "micro-batch 3" in results[0]
    assert "limit 4 s" in results[0]


def test_crossed_sends_on_one_communicator_end_in_an_error(run_pair):
    if run_pair.kind == "torch_p2p":
        pytest.skip("gloo forgives this: it matches by direction")

    def rank(me):
        def main(transport):
            sending = transport.send(operation(Send, 0, 1 - me, stage=me), filled(me))
            receiving = transport.recv(operation(Recv, 0, 1 - me, stage=1 - me))
            sending.wait()
            return receiving.wait()

        return main

    results = run_pair(rank(0), rank(1))
    assert all(str(r).startswith("error: ") for r in results)


def test_a_strict_transport_with_a_blocked_transfer_closes_without_waiting_for_its_limit(run_ranks):
    def main(env):
        dist.init_process_group("gloo", env.init_method, rank=env.rank, world_size=2, timeout=timedelta(seconds=30))
        groups = make_pipeline_groups(PAIR, env.rank, timeout_s=600)
        transport = StrictTransport(PAIR, env.rank, groups, timeout_s=600)
        if env.rank == 1:
            transport.recv(operation(Recv, 5, 0))
        transport.close()  # the ranks' own limit of 60 s fails the test
        blocked = transport._thread.is_alive()
        dist.barrier()
        return blocked

    assert run_ranks(2, main) == [False, True]


def test_an_inline_hub_keeps_no_transfer_that_has_happened():
    hub = InlineHub(timeout_s=LIMIT_S)
    first, second = hub.transport(0), hub.transport(1)
    for step in range(5):
        receiving = second.recv(operation(Recv, step, 0))
        assert len(hub._meetings) == 1
        sending = first.send(operation(Send, step, 1), filled(step))
        assert receiving.wait()[0].mean() == step
        assert sending.wait() == ()
        assert hub._meetings == {}


def test_the_groups_of_512_ranks_ask_nobody_but_their_members() -> None:
    """A barrier for each, of all ranks, would be seen in the store."""
    topology = Topology(tp=1, pp=16, dp=32)
    for rank, peers in ((0, {1}), (topology.rank(tp_rank=0, pp_rank=7, dp_rank=11), {6, 8})):
        groups, _, num_keys = pipeline_groups(topology, rank)
        assert groups.keys() == {(peer, channel) for peer in peers for channel in (0, 1)}
        assert num_keys == 0

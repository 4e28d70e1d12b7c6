"""What runs on a Ray cluster, one of this machine here: preprocessing, and the nodes of a job."""

import json
import os
from contextlib import ExitStack

import pytest

from dynapipe_ext.data.examples import generate_examples
from dynapipe_ext.data.preprocessing import inputs
from dynapipe_ext.data.preprocessing.encoding import EncodeSettings
from dynapipe_ext.data.preprocessing.inputs import find_inputs
from dynapipe_ext.data.preprocessing.preprocess import preprocess
from dynapipe_ext.data.preprocessing.workers import RayWorkers
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.launch.processes.agent import NodeEnd
from dynapipe_ext.launch.processes.nodes import RayNodes, run_on_nodes
from tests.support.limits import LIMIT_S
from tests.support.listeners import listeners_below, refuse_open
from tests.support.preprocessing import BYTES, Stopping

ray = pytest.importorskip("ray", reason="the optional package ray is not installed")

OBJECT_STORE_BYTES = 80 << 20


@pytest.fixture(scope="module")
def cluster():
    """A local cluster of two CPUs that workers of ours started: those of the tests find it connected. It is asked again
    where it has not started in its own 30 s, which no option lengthens. Its workers, too, may start late."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        for patient in ("gcs_server_port_wait_time_s", "worker_register_timeout_seconds"):
            patch.setenv(f"RAY_{patient}", str(int(LIMIT_S)))
        for has_more in (True, True, False):
            settings = EncodeSettings(target="dataset")
            workers = RayWorkers(settings, BYTES, local_cpus=2, object_store_bytes=OBJECT_STORE_BYTES)
            try:
                stack.enter_context(workers)
                break
            except Exception as error:
                if not has_more or "timed out during startup" not in str(error):
                    raise
                ray.shutdown()
        yield
    assert not ray.is_initialized()  # what was started with a context ends with it


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "BLOCK_BYTES", 2000)
    monkeypatch.setattr("dynapipe_ext.data.preprocessing.compressed._READ_BYTES", 500)
    lines = [json.dumps({"input": e.input, "target": e.target}) for e in generate_examples(num_samples=60, seed=3)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    return find_inputs([tmp_path / "d.jsonl"])


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_cluster_of_its_own_listens_on_loopback_only(cluster):
    """Ray runs what it is sent. A cluster that is named is the user's."""
    refuse_open(listeners_below(os.getpid()))


def test_a_ray_cluster_goes_on_where_a_local_run_was_stopped_and_gives_the_same_bytes(tmp_path, cluster, corpus):
    settings = EncodeSettings(target="dataset")
    preprocess(corpus, tmp_path / "local", settings=settings, encoder=BYTES)
    with pytest.raises(KeyboardInterrupt):
        preprocess(corpus, tmp_path / "ray", settings=settings, encoder=BYTES, workers=Stopping(settings, 3))
    workers = RayWorkers(settings, BYTES, num_workers=2)
    outcome = preprocess(corpus, tmp_path / "ray", settings=settings, encoder=BYTES, workers=workers)
    assert 0 < outcome.num_kept_samples < 60
    assert files_of(tmp_path / "ray") == files_of(tmp_path / "local")
    assert ray.is_initialized()  # what was connected before stays


def test_an_error_on_the_cluster_is_the_one_of_a_local_run_and_work_goes_on_locally(tmp_path, cluster, corpus):
    text = (tmp_path / "d.jsonl").read_text()
    (tmp_path / "d.jsonl").write_text(text + '\n{"input": "x"}')
    settings = EncodeSettings(target="megatron", keys=("input", "target"), append_eod=False)
    with pytest.raises(DataError, match=r"d\.jsonl, line 61: the record lacks 'target'"):
        preprocess(
            find_inputs([tmp_path / "d.jsonl"]),
            tmp_path / "out",
            settings=settings,
            encoder=BYTES,
            workers=RayWorkers(settings, BYTES, num_workers=1),
        )
    (tmp_path / "d.jsonl").write_text(text)
    outcome = preprocess(corpus, tmp_path / "out", settings=settings, encoder=BYTES)
    assert outcome.num_kept_samples > 0
    assert outcome.num_samples == 60


def test_more_workers_than_cpus_are_refused(cluster):
    with (
        pytest.raises(ConfigError, match="3 workers need a CPU each but the Ray cluster has 2"),
        RayWorkers(EncodeSettings(target="dataset"), BYTES, num_workers=3) as workers,
    ):
        list(workers.run(inputs.BlockStream([])))


def test_a_file_that_a_node_does_not_see_is_named(tmp_path, cluster, corpus):
    settings = EncodeSettings(target="dataset")
    blocks = inputs.BlockStream(corpus, unit=settings.unit, columns=settings.columns)
    (tmp_path / "d.jsonl").unlink()
    with RayWorkers(settings, BYTES, num_workers=1) as workers, pytest.raises(DataError, match="where all nodes see"):
        list(workers.run(blocks))


def test_a_node_of_the_cluster_runs_what_it_is_told_and_ends_as_that_did(cluster):
    nodes = RayNodes(1, 2, None)
    assert nodes.first_address.count(".") == 3
    line = 'test -n "$RAY_JOB_ID" -a "$OMP_NUM_THREADS" = 1 && exit 2'
    assert run_on_nodes(nodes, [line], 5.0) == NodeEnd(2)


def test_a_node_is_told_to_save_ends_with_its_input_and_is_missed_when_its_actor_dies(
    tmp_path, cluster, wait_until_gone, monkeypatch
):
    nodes = RayNodes(1, 2, None)  # the room of the job before is free again
    nodes.start([f"echo $$ > {tmp_path}/shell; exec sh -c 'read a; echo $a > {tmp_path}/told; cat; exit 138'"])
    while not (tmp_path / "shell").exists() or not (tmp_path / "shell").read_text():
        assert nodes.ended(0.02) == {}
    nodes.order("save")
    nodes.close()
    assert (tmp_path / "told").read_text() == "save\n"
    assert nodes.ended(0.0) == {"Ray node 0": 138}
    again = RayNodes(1, 1, None)
    again.start([f"echo $$ > {tmp_path}/next; exec sleep 60"])
    while not (tmp_path / "next").exists() or not (tmp_path / "next").read_text():
        assert again.ended(0.02) == {}
    ray.kill(again._actors[0])
    while not again.ended(0.1):
        pass
    assert again.ended(0.0) == {"Ray node 0": 75}
    wait_until_gone(int((tmp_path / "next").read_text()))
    monkeypatch.setattr("dynapipe_ext.launch.processes.nodes._END_S", 0.1)
    again.close()


def test_nodes_that_the_cluster_has_not_got_are_refused(cluster, monkeypatch):
    monkeypatch.setattr("dynapipe_ext.launch.processes.nodes._PLACE_S", 0.2)
    with pytest.raises(ConfigError, match="no 2 free nodes with 1 CPU each"):
        RayNodes(2, 1, None)

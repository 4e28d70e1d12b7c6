import json

import pytest

from dynapipe_ext.data.generation import generate_examples
from dynapipe_ext.data.preprocessing import inputs
from dynapipe_ext.data.preprocessing.encoding import EncodeSettings
from dynapipe_ext.data.preprocessing.inputs import find_inputs
from dynapipe_ext.data.preprocessing.preprocess import preprocess
from dynapipe_ext.data.preprocessing.ray_workers import RayWorkers
from dynapipe_ext.errors import ConfigError, DataError
from tests.support.preprocessing import BYTES, Stopping

ray = pytest.importorskip("ray", reason="the optional package ray is not installed")

OBJECT_STORE_BYTES = 80 << 20


@pytest.fixture(scope="module")
def cluster():
    """A local cluster of two CPUs that workers of ours started: those of the tests find it connected."""
    starting = RayWorkers(EncodeSettings(target="dataset"), BYTES, local_cpus=2, object_store_bytes=OBJECT_STORE_BYTES)
    with starting:
        yield
    assert not ray.is_initialized()  # what was started with a context ends with it


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "BLOCK_BYTES", 2000)
    monkeypatch.setattr("dynapipe_ext.data.reading._READ_BYTES", 500)
    lines = [json.dumps({"input": e.input, "target": e.target}) for e in generate_examples(num_samples=60, seed=3)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    return find_inputs([tmp_path / "d.jsonl"])


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


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

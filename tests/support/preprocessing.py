"""Corpora of a few blocks, and workers that stop or count, for the tests of preprocessing."""

import itertools
import json

import pytest

from dynapipe_ext.data.examples import generate_examples
from dynapipe_ext.data.preprocessing import inputs
from dynapipe_ext.data.preprocessing.encoder_loading import load_encoder
from dynapipe_ext.data.preprocessing.encoding import EncodeSettings
from dynapipe_ext.data.preprocessing.inputs import find_inputs
from dynapipe_ext.data.preprocessing.preprocess import preprocess
from dynapipe_ext.data.preprocessing.workers import InlineWorkers

BYTES = load_encoder("bytes")
DATASET = EncodeSettings(target="dataset")
WORK = ".out.preparing"


@pytest.fixture
def small_blocks(monkeypatch):
    """A few kilobytes make many blocks."""
    monkeypatch.setattr(inputs, "BLOCK_BYTES", 2000)
    monkeypatch.setattr("dynapipe_ext.data.preprocessing.compressed._READ_BYTES", 500)


class Stopping:
    """Workers that raise KeyboardInterrupt instead of a result, after so many."""

    def __init__(self, settings, num_results, encoder=BYTES):
        self.inner, self.num_results = InlineWorkers(settings, encoder), num_results

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        pass

    def run(self, blocks):
        yield from itertools.islice(self.inner.run(blocks), self.num_results)
        raise KeyboardInterrupt


class Counting(InlineWorkers):
    """Counts the blocks that it encodes."""

    num_blocks = 0

    def run(self, blocks):
        for result in super().run(blocks):
            self.num_blocks += 1
            yield result


def jsonl(path, rows):
    """`rows` as a file of JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def made_up(path, num_samples=60, seed=3):
    """Made-up pairs as a file of JSON Lines."""
    examples = generate_examples(num_samples=num_samples, seed=seed)
    return jsonl(path, ({"input": e.input, "target": e.target, "task": e.task} for e in examples))


def content(folder):
    """What is in the files of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else None


def stopped(tmp_path, settings=DATASET, name="out"):
    """The files of a run that was stopped after 5 blocks; `whole` is what becomes of them."""
    files = find_inputs([made_up(tmp_path / "a.jsonl"), made_up(tmp_path / "b.jsonl", seed=4)])
    preprocess(files, tmp_path / "whole", settings=settings, encoder=BYTES)
    with pytest.raises(KeyboardInterrupt):
        preprocess(files, tmp_path / name, settings=settings, encoder=BYTES, workers=Stopping(settings, 5))
    return files

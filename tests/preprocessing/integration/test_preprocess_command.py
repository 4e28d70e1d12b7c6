"""`dynapipe preprocess` as people run it: one line of mistakes, kills, Ctrl-C, and what other commands read of it."""

import bz2
import gzip
import json
import os
import select
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from dynapipe_ext.batch.topology import ActivationFormat, Topology
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.dataset import TokenDataset
from dynapipe_ext.data.examples import generate_examples
from dynapipe_ext.data.indexed_dataset import IndexedTokens
from dynapipe_ext.launch import cli
from dynapipe_ext.schedules.planner import Planner
from tests.support.limits import LIMIT_S

RUN = f"""
import sys
from dynapipe_ext.launch import cli
from dynapipe_ext.data.preprocessing import inputs
inputs.BLOCK_BYTES = {20_000}
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Made-up pairs, 2.8 MB: some 140 blocks."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    with path.open("w") as file:
        for e in generate_examples(num_samples=10_000, seed=5):
            file.write(json.dumps({"input": e.input, "target": e.target, "text": e.input}) + "\n")
    return path


def command(*arguments):
    return cli.main(["preprocess", *map(str, arguments)])


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus):
    """The corpus, prepared by one worker that nothing stopped."""
    path = tmp_path_factory.mktemp("prepared") / "whole"
    assert command("--input", corpus, "--tokenizer", "bytes", "--output", path, "--workers", 1) == 0
    return path


def started(*arguments):
    return subprocess.Popen(
        [sys.executable, "-c", RUN, "preprocess", *map(str, arguments)], stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )


def until_it_works(process):
    """Wait for the first line of progress."""
    readable, _, _ = select.select([process.stderr], [], [], LIMIT_S)
    assert readable, "no progress in time"
    assert b"tokens/s" in process.stderr.readline()


def children_of(pid):
    found = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


def wait_until_gone(pids):
    deadline = time.monotonic() + LIMIT_S
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ready, _, _ = select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))
        os.close(pidfd)
        assert ready, f"process {pid} outlives the command"


@pytest.mark.parametrize(("ending", "status"), [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_ended_leaves_no_process_and_no_output_and_goes_on(tmp_path, corpus, whole, ending, status):
    arguments = ("--input", corpus, "--tokenizer", "bytes", "--output", tmp_path / "out", "--workers", 2)
    process = started(*arguments)
    with process:
        until_it_works(process)
        workers = children_of(process.pid)
        assert workers
        process.send_signal(ending)
        rest = process.communicate(timeout=LIMIT_S)[1].decode()
    assert process.returncode == status
    assert ("stopped: what is done is kept" in rest) == (ending != signal.SIGKILL)
    wait_until_gone(workers)
    assert not (tmp_path / "out").exists()

    with started(*arguments, "--json") as process:
        done = json.loads(process.communicate(timeout=LIMIT_S)[0])
    assert process.returncode == 0
    assert 0 < done["kept_samples"] < done["samples"] == 10_000
    for file in whole.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_plans_and_the_loader_read_what_was_prepared(tmp_path, corpus, capsys):
    pytest.importorskip("torch")
    from dynapipe_ext.executor.loader import DynaPipeDataLoader

    assert command("--input", corpus, "--tokenizer", "bytes", "--output", tmp_path / "out", "--workers", 2) == 0
    out = capsys.readouterr().out
    assert "10,000" in out
    assert str(tmp_path / "out") in out
    lengths = str(tmp_path / "out" / "lengths.npy")
    assert cli.main(["plan", "--lengths", lengths, "--pp", "2", "--batch-size", "8", "--effort", "1"]) == 0
    data = TokenDataset.open(tmp_path / "out")
    loader = DynaPipeDataLoader(
        data, Planner(Topology(), TokenCosts(1), 1e12, schedule="1f1b", format=ActivationFormat(16)), batch_size=8
    )
    (micro_batch, *_), plan = next(iter(loader))
    first = plan.micro_batches[0].samples[0]
    row = micro_batch["tokens"].numpy().reshape(-1)[: data[first.index].positions]
    np.testing.assert_array_equal(row, data[first.index].tokens[:-1])


def test_megatrons_options_write_its_files_and_existing_ones_work(tmp_path, corpus, capsys):
    library = pytest.importorskip("tokenizers")
    pytest.importorskip("torch")
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    made = library.ByteLevelBPETokenizer()
    made.train([str(corpus)], vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False)
    made.save_model(str(tmp_path))
    gpt2 = ("--vocab-file", tmp_path / "vocab.json", "--merge-file", tmp_path / "merges.txt")
    prefix = tmp_path / "my-gpt2"
    capsys.readouterr()
    assert (
        command(
            *("--input", corpus, *gpt2, "--tokenizer-type", "GPT2BPETokenizer", "--append-eod", "--workers", 2),
            *("--json-keys", "text", "target", "--output-prefix", prefix, "--dataset-impl", "mmap", "--json"),
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert (result["samples"], result["dtype"], result["vocab_size"]) == (10_000, "uint16", 400)
    data = megatron.IndexedDataset(f"{prefix}_target_document")
    expected = [e.target for e in generate_examples(num_samples=50, seed=5)]
    assert [data[i].tolist() for i in range(50)] == [[*made.encode(text).ids, 0] for text in expected]

    name = f"{prefix}_text_document"
    written = np.load(f"{name}.lengths.npy")
    os.unlink(f"{name}.lengths.npy")
    assert command("--input", f"{name}.idx", "--lengths-only") == 0
    np.testing.assert_array_equal(np.load(f"{name}.lengths.npy"), written)
    assert command("--input", name, "--vocab-size", 400, "--output", tmp_path / "imported") == 0
    imported, mapped = TokenDataset.open(tmp_path / "imported"), IndexedTokens(name)
    np.testing.assert_array_equal(imported.lengths, mapped.lengths)
    np.testing.assert_array_equal(imported[77].tokens, mapped[77].tokens)


def test_several_files_of_every_form_make_one_dataset_in_the_order_given(tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["from parquet"]}), tmp_path / "p.parquet")
    (tmp_path / "t1.txt").write_text("first line\nsecond line\n")
    (tmp_path / "t2.txt.bz2").write_bytes(bz2.compress(b"third line"))
    (tmp_path / "j.jsonl").write_text('{"text": "from json"}\n')
    (tmp_path / "sub").mkdir()
    files = (tmp_path / "p.parquet", tmp_path / "t*.txt*", tmp_path / "j.jsonl")
    assert command("--input", *files, "--tokenizer", "bytes", "--output", tmp_path / "sub" / "out") == 0
    data = TokenDataset.open(tmp_path / "sub" / "out")
    texts = [data.tokenizer().decode(data[i].tokens.tolist()) for i in range(len(data))]
    assert texts == ["from parquet", "first line", "second line", "third line", "from json"]


BASE = ("--tokenizer", "bytes", "--output", "out")
OF_TEXT = (
    "--tokenizer-type HuggingFaceTokenizer", "--vocab-file v", "--merge-file m", "--log-interval 5",
    "--workers 2", "--ray", "--ray-address auto",
    "--dataset-impl mmap", "--text-unit document", "--max-seq-len 0",
)  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--input", "d.jsonl", "--output", "out"), "no tokenizer: name one with --tokenizer"),
        (("--input", "none.jsonl", *BASE), "none.jsonl does not exist"),
        (("--input", "*.parquet", *BASE), "no file fits '*.parquet'"),
        (("--input", "bad.jsonl", *BASE), "bad.jsonl, line 2, column 10: not JSON"),
        (
            ("--input", "d.jsonl", "--json-keys", "body", *BASE),
            "d.jsonl, line 1: the record lacks 'body' (it has 'text')",
        ),
        (
            ("--input", "chat.jsonl", *BASE),
            "chat.jsonl, line 1: the record has 'messages', which needs the chat template",
        ),
        (("--input", "d.jsonl", *BASE, "--workers", "0"), "--workers is 0 but must be at least 1"),
        (("--input", "d.jsonl", *BASE, "--json-keys", "a", "b"), "one text a record but 2 keys are named"),
        (("--input", "d.jsonl", *BASE, "--vocab-size", "300"), "--vocab-size goes with --tokenizer bpe"),
        (("--input", "d.jsonl", "--tokenizer", "bpe", "--output", "out"), "say how large with --vocab-size"),
        (("--input", "d.jsonl", *BASE, "--vocab-file", "v"), "--vocab-file and --merge-file go together"),
        (("--input", "d.jsonl", *BASE, "--vocab-file", "v", "--merge-file", "m"), "are two tokenizers"),
        (("--input", "d.jsonl", *BASE, "--tokenizer-type", "SentencePiece"), "give GPT2BPETokenizer"),
        (("--input", "d.jsonl", *BASE, "--tokenizer-type", "GPT2BPETokenizer"), "needs --vocab-file"),
        (("--input", "d.jsonl", *BASE, "--add-special-tokens"), "is for --output-prefix"),
        (("--input", "d.jsonl", *BASE, "--dataset-impl", "mmap"), "--dataset-impl mmap is for --output-prefix"),
        (("--input", "d.jsonl", "--tokenizer", "bytes", "--output", "."), "names no new folder"),
        (("--input", "d.jsonl", "--lengths-only"), "--lengths-only needs one"),
        (("--input", "d.idx", "e.idx", "--lengths-only"), "an .idx must be the only input"),
        (("--input", "d.idx", "--lengths-only"), "give the path of a Megatron data set"),
        (
            ("--input", "d.idx", *BASE, "--truncate", "9"),
            "d.idx is tokenized already, and --truncate is for",
        ),
        *(
            (("--input", "d.idx", *BASE, *flags), f"d.idx is tokenized already, and {flags[0]} is for text: leave")
            for flags in map(str.split, OF_TEXT)
        ),
        (("--input", "d.idx", "--vocab-size", "9", "--output", "o", "--eod-token", "x"), "--eod-token is for text"),
        (("--input", "d.idx", *BASE, "--vocab-size", "9"), "--vocab-size is 9 but bytes has 258 ids: leave one"),
        (("--input", "d.idx", "--vocab-size", "0", "--output", "out"), "--vocab-size is 0 but must be at least 1"),
        (("--input", "d.idx", *BASE, "--tokenizer-model", "b"), "--tokenizer and --tokenizer-model mean the same"),
        (("--input", "d.idx", "--tokenizer-model", "bytes", "--output", "out"), "give the path of a Megatron data set"),
        (
            ("--input", "d.idx", "--lengths-only", "--tokenizer", "bytes"),
            "--lengths-only counts tokens, whatever their ids, without --tokenizer: leave it out",
        ),
        (("--input", "d.idx", "--lengths-only", "--vocab-size", "9"), "without --vocab-size: leave it out"),
        (("--input", "d.idx", "--output", "out"), "give --vocab-size, or --tokenizer"),
        (("--input", "d.idx", "--output-prefix", "x", "--tokenizer", "bytes"), "is in Megatron's format already"),
        (
            ("--input", "d.jsonl", "--tokenizer", "bytes", "--output-prefix", "x", "--fields", "a", "b"),
            "--fields is for samples",
        ),
    ],
)
def test_a_mistake_is_one_line_that_names_it_and_status_2(tmp_path, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "chat.jsonl").write_text('{"messages": []}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    assert command(*arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert error[0].startswith("dynapipe: error: ")
    assert says in error[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "chat.jsonl", "d.jsonl"]


def test_help_shows_examples(capsys):
    with pytest.raises(SystemExit):
        command("--help")
    out = capsys.readouterr().out
    assert "--output-prefix my-gpt2" in out
    assert "dynapipe plan --lengths prepared/lengths.npy" in out


def test_the_files_of_a_folder_are_written_in_its_own_tree(tmp_path, capsys):
    source = tmp_path / "source"
    (source / "deep" / "er").mkdir(parents=True)
    (source / ".hidden").write_text("no data")
    (source / "a.b.jsonl").write_text('{"text": "one"}\n')
    with gzip.open(source / "deep" / "er" / "c.jsonl.gz", "wt") as file:
        file.write('{"text": "two"}\n{"text": "three"}\n')
    given = ("--input", source, "--tokenizer", "bytes", "--workers", 1, "--json")
    assert command(*given, "--output", tmp_path / "out") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["files"], result["samples"]) == (2, 3)
    assert [len(TokenDataset.open(tmp_path / "out" / name)) for name in ("a.b", "deep/er/c")] == [1, 2]
    assert command(*given, "--output-prefix", tmp_path / "mega") == 0
    assert (tmp_path / "mega" / "deep" / "er" / "c_text_document.idx").is_file()
    (source / "a.b.txt").write_text("four\n")
    assert command(*given, "--output", tmp_path / "other") == 2
    assert "would both be written to" in capsys.readouterr().err
    assert command(*given, "--output", source / "in") == 2
    assert "lies in the input folder" in capsys.readouterr().err

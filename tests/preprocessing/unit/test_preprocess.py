import numpy as np
import pytest

from dynapipe_ext.data.dataset import TokenDataset, is_prepared, open_prepared, prepare
from dynapipe_ext.data.indexed_dataset import IndexedTokens, lengths_path
from dynapipe_ext.data.preprocessing import inputs
from dynapipe_ext.data.preprocessing.encoder_loading import load_encoder
from dynapipe_ext.data.preprocessing.encoding import EncodeSettings, read_examples
from dynapipe_ext.data.preprocessing.inputs import find_inputs
from dynapipe_ext.data.preprocessing.preprocess import preprocess, train_bpe
from dynapipe_ext.data.preprocessing.workers import ProcessWorkers
from dynapipe_ext.errors import ConfigError, DataError
from tests.support.preprocessing import BYTES, DATASET, WORK, content, jsonl, made_up, small_blocks  # noqa: F401

pytestmark = pytest.mark.usefixtures("small_blocks")

MEGATRON = EncodeSettings(target="megatron", append_eod=False)


def pieces_of(tmp_path, rows, settings=DATASET, encoder=BYTES, name="out"):
    files = find_inputs([jsonl(tmp_path / f"{name}.jsonl", rows)])
    preprocess(files, tmp_path / name, settings=settings, encoder=encoder)
    return TokenDataset.open(tmp_path / name)


def test_the_dataset_is_the_one_that_prepare_makes(tmp_path):
    path = made_up(tmp_path / "d.jsonl")
    files = find_inputs([path])
    for name, encoder in (("bytes", BYTES), ("bpe", train_bpe(files, DATASET, 300))):
        preprocess(files, tmp_path / name, settings=DATASET, encoder=encoder)
        expected = prepare(
            lambda: read_examples(files, DATASET.fields),
            tmp_path / f"{name}-prepared",
            tokenizer=name,
            vocab_size=300,
            max_seq_len=100_000,
            truncate=False,
        )
        found = TokenDataset.open(tmp_path / name)
        assert found.fingerprint == expected.fingerprint
        assert found.tasks == expected.tasks
        np.testing.assert_array_equal(found.lengths, expected.lengths)


@pytest.mark.parametrize("max_seq_len", [2, 5, 40])
def test_samples_are_cut_as_prepare_cuts_them(tmp_path, max_seq_len):
    path = made_up(tmp_path / "d.jsonl")
    choices = {"max_seq_len": max_seq_len, "truncate": True}
    settings = EncodeSettings(target="dataset", **choices)
    outcome = preprocess(find_inputs([path]), tmp_path / "out", settings=settings, encoder=BYTES)
    expected = prepare(
        lambda: read_examples(find_inputs([path]), settings.fields), tmp_path / "p", tokenizer="bytes", **choices
    )
    assert TokenDataset.open(tmp_path / "out").fingerprint == expected.fingerprint
    assert outcome.num_truncated == expected.num_truncated > 0


@pytest.mark.parametrize("settings", [DATASET, EncodeSettings(target="megatron", keys=("input", "target"))])
def test_every_number_of_workers_gives_the_same_bytes(tmp_path, settings):
    files = find_inputs([made_up(tmp_path / "a.jsonl"), made_up(tmp_path / "b.jsonl", 7, seed=4)])
    found = []
    for number, workers in enumerate((None, ProcessWorkers(settings, BYTES, 1), ProcessWorkers(settings, BYTES, 3))):
        folder = tmp_path / str(number)
        folder.mkdir()
        preprocess(files, folder / "out", settings=settings, encoder=BYTES, workers=workers)
        assert not (folder / WORK).exists()
        found.append({str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()})
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 7 if settings is DATASET else 6


def test_block_borders_leave_no_trace_in_the_output(tmp_path, monkeypatch):
    files = find_inputs([made_up(tmp_path / "d.jsonl")])
    preprocess(files, tmp_path / "small", settings=DATASET, encoder=BYTES)
    monkeypatch.setattr(inputs, "BLOCK_BYTES", 1 << 20)
    preprocess(files, tmp_path / "large", settings=DATASET, encoder=BYTES)
    assert content(tmp_path / "small") == content(tmp_path / "large")


def test_what_the_same_files_and_settings_made_is_left_as_it_is(tmp_path):
    files = find_inputs([made_up(tmp_path / "d.jsonl")])
    first = preprocess(files, tmp_path / "out", settings=DATASET, encoder=BYTES)
    before = content(tmp_path / "out")
    again = preprocess(files, tmp_path / "out", settings=DATASET, encoder=BYTES)
    assert again.reused
    assert (again.num_samples, again.num_tokens) == (first.num_samples, first.num_tokens)
    assert content(tmp_path / "out") == before


@pytest.mark.parametrize("settings", [DATASET, MEGATRON])
def test_an_output_that_exists_is_replaced_on_request_alone(tmp_path, settings):
    files = find_inputs([jsonl(tmp_path / "d.jsonl", [{"text": "one"}])])
    preprocess(files, tmp_path / "out", settings=settings, encoder=BYTES)
    files = find_inputs([jsonl(tmp_path / "d.jsonl", [{"text": "another"}])])
    with pytest.raises(ConfigError, match="exists, made from other files or settings: pass --overwrite"):
        preprocess(files, tmp_path / "out", settings=settings, encoder=BYTES)
    outcome = preprocess(files, tmp_path / "out", settings=settings, encoder=BYTES, overwrite=True)
    assert outcome.num_samples == 1
    assert not outcome.reused


def test_an_output_that_is_a_link_is_written_where_it_points_to(tmp_path):
    link, place = tmp_path / "link", tmp_path / "disk" / "out"
    link.symlink_to(place)
    for text in ("one", "another"):
        files = find_inputs([jsonl(tmp_path / "d.jsonl", [{"text": text}])])
        preprocess(files, link, settings=DATASET, encoder=BYTES, overwrite=True)
        assert link.is_symlink()
        assert [path.name for path in place.parent.iterdir()] == ["out"]
        assert len(TokenDataset.open(place)[0].tokens) == len(text) + 2


def test_a_folder_that_is_no_data_is_never_replaced(tmp_path):
    files = find_inputs([jsonl(tmp_path / "d.jsonl", [{"text": "one"}])])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("important")
    for overwrite in (False, True):
        with pytest.raises(DataError, match="exists and is not prepared data"):
            preprocess(files, tmp_path / "out", settings=DATASET, encoder=BYTES, overwrite=overwrite)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "important"


def test_named_keys_are_plain_text_even_beside_a_pair(tmp_path):
    rows = [{"input": "ab", "target": "c", "story": "xyz"}]
    settings = EncodeSettings(target="dataset", keys=("story",), keys_only=True)
    assert pieces_of(tmp_path, rows, settings)[0].tokens.tolist() == [257, 120, 121, 122, 256]
    settings = EncodeSettings(target="dataset", pair=("input", "story"))
    sample = pieces_of(tmp_path, rows, settings, name="pair")[0]
    assert (sample.tokens.tolist(), sample.first_target) == ([97, 98, 257, 120, 121, 122, 256], 3)


def test_without_a_separator_the_target_follows_its_input_and_all_but_the_first_token_are_labels(tmp_path):
    library = pytest.importorskip("tokenizers")
    words = library.Tokenizer(library.models.WordLevel({"<eos>": 0, "a": 1, "b": 2, "c": 3, "d": 4}, unk_token="d"))
    words.pre_tokenizer = library.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    rows = [{"input": "a b", "target": " c"}, {"text": "a b c"}, {"input": "", "target": "b"}]
    data = pieces_of(tmp_path, rows, encoder=load_encoder(tmp_path / "words.json"))
    assert [(data[i].tokens.tolist(), data[i].first_target) for i in range(3)] == [
        ([1, 2, 3, 0], 2),
        ([1, 2, 3, 0], 1),
        ([2, 0], 1),
    ]
    assert data.lengths.tolist() == [[data[i].positions, 0, data[i].target] for i in range(3)]
    assert data.tokenizer().encode(["c d"]) == [[3, 4]]
    settings = EncodeSettings(target="dataset", max_seq_len=1, truncate=True)
    cut = pieces_of(tmp_path, rows, settings, load_encoder(tmp_path / "words.json"), "cut")
    assert [(cut[i].tokens.tolist(), cut[i].first_target) for i in range(3)] == [([3, 0], 1), ([1, 2], 1), ([2, 0], 1)]
    with_border = load_encoder(tmp_path / "words.json", separator="d")
    assert pieces_of(tmp_path, rows, encoder=with_border, name="border")[0].tokens.tolist() == [1, 2, 4, 3, 0]


def test_a_record_with_nothing_in_it_is_refused_or_left_out_and_counted(tmp_path):
    rows = [{"text": "a"}, {"text": ""}, {"input": "", "target": ""}, {"text": "b"}]
    files = find_inputs([jsonl(tmp_path / "d.jsonl", rows)])
    with pytest.raises(DataError, match=r"d\.jsonl, line 2: the record is empty .*--skip-empty"):
        preprocess(files, tmp_path / "out", settings=DATASET, encoder=BYTES)
    settings = EncodeSettings(target="dataset", skip_empty=True)
    outcome = preprocess(files, tmp_path / "out", settings=settings, encoder=BYTES)
    assert (outcome.num_samples, outcome.num_skipped) == (2, 2)


def test_a_corpus_whose_records_are_all_empty_is_refused_for_that(tmp_path):
    files = find_inputs([jsonl(tmp_path / "d.jsonl", [{"text": "", "url": "a"}] * 3)])
    settings = EncodeSettings(target="dataset", skip_empty=True)
    with pytest.raises(DataError, match="the input has no samples: all 3 records are empty: give files"):
        preprocess(files, tmp_path / "out", settings=settings, encoder=BYTES)
    settings = EncodeSettings(target="megatron", keys=("url", "text"))
    with pytest.raises(DataError, match="field 'text' is empty in all records: fill it, or name another"):
        preprocess(files, tmp_path / "out", settings=settings, encoder=BYTES)


def test_a_file_without_records_is_named(tmp_path):
    (tmp_path / "blank.jsonl").write_text("\n \n")
    files = find_inputs([jsonl(tmp_path / "d.jsonl", [{"text": "a"}]), tmp_path / "blank.jsonl"])
    for order in (files, files[::-1]):
        with pytest.raises(DataError, match=r"blank\.jsonl is empty \(it has no records\): leave it out"):
            preprocess(order, tmp_path / "out", settings=DATASET, encoder=BYTES)


def test_a_sample_that_is_too_long_is_named_by_its_line(tmp_path):
    files = find_inputs([jsonl(tmp_path / "d.jsonl", [{"text": "a"}, {"text": "abcdef"}])])
    settings = EncodeSettings(target="dataset", max_seq_len=6)
    with pytest.raises(DataError, match=r"line 2: the sample has 7 tokens but max_seq_len is 6: pass --truncate or"):
        preprocess(files, tmp_path / "out", settings=settings, encoder=BYTES)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (EncodeSettings(target="dataset", keys=("a", "b")), "one text a record but 2 keys"),
        (EncodeSettings(target="dataset", truncate=True), "--truncate cuts at --max-seq-len"),
        (EncodeSettings(target="dataset", max_seq_len=0), "--max-seq-len is 0 but must be at least 1"),
        (EncodeSettings(target="megatron", max_seq_len=9), "holds whole documents"),
        (EncodeSettings(target="megatron", keys=("a", "a")), "give one or more, each once"),
        (EncodeSettings(target="megatron", keys=("a/b",)), "cannot be part of a file's name"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(tmp_path, settings, says):
    files = find_inputs([jsonl(tmp_path / "d.jsonl", [{"text": "a"}])])
    with pytest.raises(ConfigError, match=says):
        preprocess(files, tmp_path / "out", settings=settings, encoder=BYTES)


def test_documents_are_the_bytes_of_megatrons_own_builder(tmp_path):
    """Empty ones and lists of sentences too: the loop is that of Encoder.encode in Megatron's preprocess_data.py."""
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    texts = ["", "a text", [], ["one.", "", "two."], [""], "last", ""]
    files = find_inputs([jsonl(tmp_path / "d.jsonl", [{"text": text} for text in texts])])
    settings = EncodeSettings(target="megatron", append_eod=True)
    outcome = preprocess(files, tmp_path / "ours", settings=settings, encoder=BYTES)
    assert outcome.num_samples == len(texts)
    dtype = megatron.DType.optimal_dtype(BYTES.vocab_size)
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for text in texts:
        sentences = [list(BYTES.encode([one])[0]) for one in (text if isinstance(text, list) else [text])]
        sentences = [ids for ids in sentences if ids]
        if sentences:
            sentences[-1].append(BYTES.eos)
        builder.add_document([i for ids in sentences for i in ids], [len(ids) for ids in sentences])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        ours = (tmp_path / f"ours_text_document{suffix}").read_bytes()
        assert ours == (tmp_path / f"theirs{suffix}").read_bytes()


def test_megatrons_own_reader_finds_each_key_as_a_data_set(tmp_path):
    pytest.importorskip("torch")
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    rows = [{"text": "ab", "title": "x"}, {"text": "c", "title": "yz"}]
    files = find_inputs([jsonl(tmp_path / "d.jsonl", rows)])
    settings = EncodeSettings(target="megatron", keys=("text", "title"), append_eod=True)
    outcome = preprocess(files, tmp_path / "my", settings=settings, encoder=BYTES)
    assert [path.name for path in outcome.outputs] == [
        f"my_{key}_document.{kind}" for key in ("text", "title") for kind in ("bin", "idx", "lengths.npy")
    ]
    found = {key: megatron.IndexedDataset(str(tmp_path / f"my_{key}_document")) for key in ("text", "title")}
    assert [found["text"][i].tolist() for i in range(2)] == [[97, 98, 256], [99, 256]]
    assert [found["title"][i].tolist() for i in range(2)] == [[120, 256], [121, 122, 256]]
    assert found["text"].index.dtype is np.uint16
    assert found["text"].document_indices.tolist() == [0, 1, 2]
    ours = IndexedTokens(tmp_path / "my_title_document")
    np.testing.assert_array_equal(np.load(lengths_path(tmp_path / "my_title_document")), ours.lengths)


def test_progress_ends_at_all_bytes_and_tokens(tmp_path):
    files = find_inputs([made_up(tmp_path / "a.jsonl"), made_up(tmp_path / "b.jsonl", seed=4)])
    seen = []
    outcome = preprocess(files, tmp_path / "out", settings=DATASET, encoder=BYTES, progress=seen.append)
    assert seen[-1].done_bytes == seen[-1].total_bytes == sum(file.stored_bytes for file in files)
    assert (seen[-1].num_samples, seen[-1].num_tokens) == (outcome.num_samples, outcome.num_tokens)
    assert [now.done_bytes for now in seen] == sorted(now.done_bytes for now in seen)
    assert len(seen) > 5


def test_a_prepared_folder_opens_for_a_model_that_it_fits(tmp_path):
    data = pieces_of(tmp_path, [{"text": "a"}, {"text": "abc"}])
    assert is_prepared(tmp_path / "out")
    assert not is_prepared(tmp_path / "out.jsonl")
    assert open_prepared(tmp_path / "out", max_seq_len=4).fingerprint == data.fingerprint
    with pytest.raises(DataError, match=r"sample 1 has 4 tokens but max_seq_len is 3: raise it, or prepare"):
        open_prepared(tmp_path / "out", max_seq_len=3)

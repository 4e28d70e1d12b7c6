import pickle
import struct

import numpy as np
import pytest

from dynapipe_ext.data.dataset import TokenDataset
from dynapipe_ext.data.indexed_dataset import (
    IndexedTokens,
    bin_path,
    idx_path,
    import_indexed,
    index_lengths,
    is_indexed,
    lengths_path,
    read_index,
    token_dtype,
    write_index,
    write_lengths,
)
from dynapipe_ext.errors import ConfigError, DataError

torch = pytest.importorskip("torch")
megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")

# Documents of sequences of tokens: Megatron's tool writes one sequence a document, or one a sentence.
DOCUMENTS = [[[5, 6, 7]], [[1, 2], [3, 4, 9, 9]], [[8, 8]]]
SEQUENCES = [sequence for document in DOCUMENTS for sequence in document]


def built(folder, dtype=np.int32, documents=DOCUMENTS, multimodal=False, name="theirs"):
    prefix = folder / name
    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=multimodal)
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


def written(folder, dtype, documents=DOCUMENTS, name="ours"):
    prefix = folder / name
    sequences = [sequence for document in documents for sequence in document]
    bin_path(prefix).write_bytes(np.concatenate([np.array(s, dtype) for s in sequences]).tobytes())
    ends = np.cumsum([0, *map(len, documents)])
    write_index(idx_path(prefix), np.dtype(dtype), np.array([len(s) for s in sequences]), ends)
    return prefix


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_megatron_reads_what_is_written_here(tmp_path, dtype):
    data = megatron.IndexedDataset(str(written(tmp_path, dtype)))
    assert [data[i].tolist() for i in range(len(data))] == SEQUENCES
    assert data.index.dtype is dtype
    assert data.document_indices.tolist() == [0, 1, 3, 4]
    assert data.get(2, offset=1, length=2).tolist() == [4, 9]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_the_files_are_those_of_megatrons_builder_byte_for_byte(tmp_path, dtype):
    ours, theirs = written(tmp_path, dtype), built(tmp_path, dtype)
    assert idx_path(ours).read_bytes() == idx_path(theirs).read_bytes()
    assert bin_path(ours).read_bytes() == bin_path(theirs).read_bytes()


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_what_megatrons_builder_wrote_is_read_here(tmp_path, dtype):
    data = IndexedTokens(built(tmp_path, dtype))
    assert [data[i].tokens.tolist() for i in range(len(data))] == SEQUENCES
    assert data[1].tokens.dtype == np.int64
    assert data[1].first_target == 1
    assert data.index.documents.tolist() == [0, 1, 3, 4]
    with pytest.raises(IndexError, match="sample 4 is outside of the 4"):
        data[4]


@pytest.mark.parametrize("vocab_size", [100, 50257, 65_499, 65_500, 65_536, 128_256])
def test_the_dtype_is_the_one_that_megatron_takes_for_a_vocabulary(vocab_size):
    assert token_dtype(vocab_size) == np.dtype(megatron.DType.optimal_dtype(vocab_size))


def test_lengths_come_from_the_index_alone_and_agree_with_the_samples(tmp_path):
    prefix = built(tmp_path)
    data = IndexedTokens(prefix)
    assert data.lengths.tolist() == [[data[i].positions, 0, data[i].target] for i in range(len(data))]
    bin_path(prefix).unlink()
    assert index_lengths(read_index(prefix)).tolist() == [[2, 0, 2], [1, 0, 1], [3, 0, 3], [1, 0, 1]]
    assert write_lengths(lengths_path(prefix), read_index(prefix).lengths) == 0
    np.testing.assert_array_equal(np.load(lengths_path(prefix)), data.lengths)


def test_a_sequence_that_teaches_nothing_is_refused_or_left_out_and_counted(tmp_path):
    prefix = built(tmp_path, documents=[[[1, 2]], [[3]], [[]], [[4, 5, 6]]])
    with pytest.raises(DataError, match=r"sequence 1 has 1 tokens; 2 sequences in all .*--skip-empty"):
        IndexedTokens(prefix)
    data = IndexedTokens(prefix, skip_empty=True)
    assert [data[i].tokens.tolist() for i in range(len(data))] == [[1, 2], [4, 5, 6]]
    assert write_lengths(lengths_path(prefix), read_index(prefix).lengths) == 2
    np.testing.assert_array_equal(np.load(lengths_path(prefix)), data.lengths)


def test_the_pickle_of_a_data_set_holds_its_path_alone(tmp_path):
    data = IndexedTokens(built(tmp_path), skip_empty=True)
    dumped = pickle.dumps(data)
    assert len(dumped) < 500
    again = pickle.loads(dumped)
    assert again[2].tokens.tolist() == data[2].tokens.tolist()
    assert again.fingerprint == data.fingerprint


def test_a_path_is_known_with_and_without_its_suffix(tmp_path):
    prefix = built(tmp_path, name="corpus.v1_text_document")
    for path in (prefix, idx_path(prefix), bin_path(prefix), str(prefix)):
        assert is_indexed(path)
        assert len(IndexedTokens(path)) == 4
    assert not is_indexed(tmp_path / "corpus.jsonl")


def test_multimodal_data_is_refused_by_name(tmp_path):
    with pytest.raises(DataError, match=r"theirs\.idx is multimodal \(4 sequence modes\): only text can be read"):
        read_index(built(tmp_path, multimodal=True))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda raw: b"NOTANIDX\x00" + raw[9:], "is not an index of Megatron's format"),
        (lambda raw: raw[:20], "ends inside its header"),
        (lambda raw: raw[:9] + struct.pack("<Q", 2) + raw[17:], "has version 2"),
        (lambda raw: raw[:17] + b"\x07" + raw[18:], "tokens are of float32"),
        (lambda raw: raw[:17] + b"\x63" + raw[18:], "tokens are of code 99"),
        (lambda raw: raw[:-1], "holds 113 bytes but its header says 114"),
        (lambda raw: raw + b"12", "holds 116 bytes but its header says 114"),
        (lambda raw: raw[:34] + struct.pack("<i", -3) + raw[38:], "a negative length"),
        (lambda raw: raw[:50] + struct.pack("<q", -4) + raw[58:], "a negative offset"),
        (lambda raw: raw[:50] + struct.pack("<q", 3) + raw[58:], "an offset inside a token"),
        (lambda raw: raw[:-16] + struct.pack("<qq", 4, 3), "documents out of order"),
        (lambda raw: raw[:-8] + struct.pack("<q", 3), "do not end with the last sequence"),
        (lambda raw: raw[:18] + struct.pack("<QQ", 0, 1) + struct.pack("<q", 0), "has 0 sequences"),
    ],
)
def test_a_damaged_index_is_refused_with_what_is_wrong(tmp_path, change, says):
    prefix = built(tmp_path)
    idx_path(prefix).write_bytes(change(idx_path(prefix).read_bytes()))
    with pytest.raises(DataError, match=says):
        read_index(prefix)


def test_a_bin_that_is_missing_or_too_short_is_refused(tmp_path):
    prefix = built(tmp_path)
    bin_path(prefix).write_bytes(bin_path(prefix).read_bytes()[:-1])
    with pytest.raises(DataError, match="holds 43 bytes but its index needs 44"):
        IndexedTokens(prefix)
    bin_path(prefix).unlink()
    with pytest.raises(DataError, match=r"it belongs beside its \.idx"):
        IndexedTokens(prefix)
    with pytest.raises(DataError, match="give the path of a Megatron data set"):
        read_index(tmp_path / "none")


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "<u2"), (65_537, "<u4")])
def test_an_import_has_the_same_tokens_and_lengths(tmp_path, vocab_size, dtype):
    prefix = built(tmp_path)
    data = import_indexed(prefix, tmp_path / "d", vocab_size=vocab_size)
    assert isinstance(data, TokenDataset)
    assert data.tokens.dtype == np.dtype(dtype)
    assert [data[i].tokens.tolist() for i in range(len(data))] == SEQUENCES
    np.testing.assert_array_equal(data.lengths, IndexedTokens(prefix).lengths)
    assert data.vocab_size == vocab_size


def test_an_import_leaves_out_what_is_between_its_samples(tmp_path):
    prefix = built(tmp_path, documents=[[[1, 2]], [[3]], [[4, 5, 6]], [[7]], [[8, 9]], [[9, 1]]])
    seen = []
    data = import_indexed(
        prefix, tmp_path / "d", vocab_size=10, skip_empty=True, progress=lambda *now: seen.append(now)
    )
    assert [data[i].tokens.tolist() for i in range(len(data))] == [[1, 2], [4, 5, 6], [8, 9], [9, 1]]
    assert data.meta["num_skipped"] == 2
    assert seen[-1] == (9, 9)


def test_an_import_refuses_ids_beyond_the_vocabulary_and_leaves_nothing(tmp_path):
    prefix = built(tmp_path)
    with pytest.raises(DataError, match="has the id 9 but the vocabulary has 9: give --vocab-size"):
        import_indexed(prefix, tmp_path / "d", vocab_size=9)
    assert {path.suffix for path in tmp_path.iterdir()} == {".bin", ".idx"}


def test_an_import_replaces_nothing_unasked(tmp_path):
    prefix = built(tmp_path)
    import_indexed(prefix, tmp_path / "d", vocab_size=10)
    with pytest.raises(ConfigError, match="exists: pass --overwrite"):
        import_indexed(prefix, tmp_path / "d", vocab_size=10)
    assert import_indexed(prefix, tmp_path / "d", vocab_size=11, overwrite=True).vocab_size == 11

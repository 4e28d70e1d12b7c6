"""Packed rows: what goes where, and that transformers models see each document as if it were alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynapipe_ext.batch.document_attention import register_document_attention
from dynapipe_ext.batching.packing.collator import IGNORED, PackingCollator, pack_rows
from dynapipe_ext.errors import ConfigError, DataError

LENGTHS = (5, 1, 9, 17, 3, 8)
VOCABULARY = 97


def documents() -> list[dict[str, Any]]:
    generator = np.random.default_rng(3)
    return [{"input_ids": generator.integers(0, VOCABULARY, length).tolist()} for length in LENGTHS]


def llama(attention: str, dtype: str = "float32") -> Any:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).eval().to(getattr(torch, dtype))


def documents_kernel() -> str:
    pytest.importorskip("transformers")
    return register_document_attention()


def gpt2(attention: str) -> Any:
    pytest.importorskip("transformers")
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=attention,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
    )
    return GPT2LMHeadModel(config).eval()


def apart(model: Any, features: list[dict[str, Any]]) -> list[Any]:
    """Logits of each document in a forward of its own."""

    with torch.no_grad():
        return [model(input_ids=torch.tensor([f["input_ids"]]), use_cache=False).logits[0] for f in features]


def furthest(model: Any, collator: PackingCollator, *, like: Any = None, **changes: Any) -> float:
    """Largest difference of a packed logit from that of the document alone, on model `like` (by default the same)."""

    features = documents()
    packed = collator.pack(features)
    with torch.no_grad():
        together = packed.unpack(model(**{**collator.model_inputs(packed), **changes}).logits)
    return max(float((a - b).abs().max()) for a, b in zip(together, apart(like or model, features), strict=True))


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=60),
    st.integers(40, 90),
    st.sampled_from(["best-fit", "in-order"]),
)
def test_each_document_is_in_one_row_and_no_row_is_overfull(lengths: list[int], room: int, packing: Any) -> None:
    rows = pack_rows(lengths, room, packing=packing)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= room for row in rows)
    if packing == "in-order":
        assert [i for row in rows for i in row] == list(range(len(lengths)))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(40, 90))
def test_best_fit_puts_each_document_into_the_fullest_row_that_takes_it(lengths: list[int], room: int) -> None:
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        free = [room - sum(lengths[i] for i in row) for row in rows]
        fits = [left for left in free if left >= lengths[index]]
        if fits:
            rows[max(r for r, left in enumerate(free) if left == min(fits))].append(index)
        else:
            rows.append([index])
    packed = pack_rows(lengths, room)
    assert len(packed) == len(rows)
    assert sorted(sum(lengths[i] for i in row) for row in packed) == sorted(sum(lengths[i] for i in r) for r in rows)


def test_best_fit_needs_fewer_rows_than_keeping_the_order() -> None:
    lengths = np.random.default_rng(0).lognormal(5.0, 1.0, 2000).astype(int).clip(1, 2048).tolist()
    best, kept = (len(pack_rows(lengths, 2048, packing=packing)) for packing in ("best-fit", "in-order"))
    assert best <= 1.01 * sum(lengths) / 2048 + 1 < kept


def test_the_arrays_of_a_batch_are_these() -> None:
    features = [
        {"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]},
        {"input_ids": [8, 9], "labels": [IGNORED, 9]},
    ]
    packed = PackingCollator(max_tokens=8, packing="in-order", pad_multiple=4).pack(features)
    assert packed.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 0], [8, 9, 0, 0, 0, 0, 0, 0]]
    x = IGNORED
    assert packed.labels.tolist() == [[x, 2, 3, 4, x, x, 7, x], [x, 9, x, x, x, x, x, x]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 0, 1, 2, 3, 4, 5]]
    assert packed.document_ids.tolist() == [[0, 0, 0, 0, 1, 1, 1, -1], [2, 2, -1, -1, -1, -1, -1, -1]]
    assert packed.cu_seqlens.tolist() == [0, 4, 7, 8, 10, 16]
    assert packed.spans == ((0, 0, 4), (0, 4, 7), (1, 0, 2))
    assert packed.num_targets == 5
    assert packed.efficiency == 9 / 16
    assert [part.tolist() for part in packed.unpack(packed.input_ids)] == [[1, 2, 3, 4], [5, 6, 7], [8, 9]]


def test_the_block_mask_looks_back_inside_its_own_document_only() -> None:
    packed = PackingCollator(pad_multiple=6).pack([{"input_ids": [1, 2]}, {"input_ids": [3, 4, 5]}])
    drawn = ["".join("x" if seen else "." for seen in row) for row in packed.block_mask()[0, 0]]
    assert drawn == ["x.....", "xx....", "..x...", "..xx..", "..xxx.", ".....x"]


@pytest.mark.parametrize("max_tokens", [None, 24])
@pytest.mark.parametrize("attention", ["positions", "block-mask", "cu_seqlens"])
@pytest.mark.parametrize("build", [llama, gpt2])
def test_packed_logits_are_those_of_single_documents(build: Any, attention: Any, max_tokens: int | None) -> None:
    collator = PackingCollator(attention=attention, max_tokens=max_tokens, pad_multiple=4)
    assert furthest(build("sdpa"), collator) <= 1e-5


def test_packed_logits_are_those_of_single_documents_under_eager_attention() -> None:
    assert furthest(llama("eager"), PackingCollator(max_tokens=24)) <= 1e-5


@pytest.mark.parametrize("build", [llama, gpt2])
def test_document_attention_is_exact_with_and_without_a_cache(build: Any) -> None:
    model = build(documents_kernel())
    collator = PackingCollator(attention="cu_seqlens", max_tokens=24, pad_multiple=4)
    for cache in (False, True):
        assert furthest(model, collator, like=build("sdpa"), use_cache=cache) <= 1e-5


def test_logits_in_float64_differ_by_rounding_alone() -> None:
    assert furthest(llama("sdpa", "float64"), PackingCollator(attention="block-mask")) <= 1e-14


def test_one_document_without_padding_has_the_same_bits_packed_or_not() -> None:

    model, feature = llama("sdpa"), documents()[3]
    with torch.no_grad():
        assert torch.equal(model(**PackingCollator()([feature])).logits[0], apart(model, [feature])[0])


def test_the_batch_avoids_the_two_traps_of_sdpa_that_it_would_otherwise_fall_into() -> None:

    model, collator = llama("sdpa"), PackingCollator()
    batch = collator(documents())
    assert batch["use_cache"] is False
    assert "attention_mask" not in batch
    assert furthest(model, collator, use_cache=True) > 0.01
    assert furthest(model, collator, attention_mask=torch.ones_like(batch["input_ids"])) > 0.01


@pytest.mark.parametrize(("attention", "kernel"), [("positions", "sdpa"), ("cu_seqlens", "documents")])
def test_loss_and_gradients_are_the_sums_over_single_documents(attention: Any, kernel: str) -> None:
    from torch.nn.functional import cross_entropy

    features = documents()
    for feature in features:
        feature["loss_mask"] = [i % 3 != 1 for i in range(len(feature["input_ids"]))]
    collator = PackingCollator(max_tokens=24, attention=attention)
    packed = collator.pack(features)
    model = llama(documents_kernel() if kernel == "documents" else kernel)
    loss = model(**collator.model_inputs(packed), num_items_in_batch=packed.num_targets).loss
    loss.backward()

    alone = llama("sdpa")
    total = torch.zeros(())
    for feature in features:
        tokens = torch.tensor(feature["input_ids"])
        keep = torch.tensor(feature["loss_mask"])[1:]
        logits = alone(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        total = total + cross_entropy(logits[keep], tokens[1:][keep], reduction="sum")
    (total / packed.num_targets).backward()
    assert loss.item() == pytest.approx(total.item() / packed.num_targets, rel=1e-6)
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert float((ours.grad - theirs.grad).abs().max()) <= 1e-5 * float(theirs.grad.abs().max()), name


def test_document_attention_refuses_what_it_would_get_wrong() -> None:

    model = llama(documents_kernel())
    with pytest.raises(ConfigError, match="cu_seqlens"):
        model(input_ids=torch.tensor([[1, 2, 3]]))
    batch = PackingCollator(attention="cu_seqlens")(documents())
    with pytest.raises(DataError, match="do not fill"):
        model(**{**batch, "cu_seq_lens_q": batch["cu_seq_lens_q"][:-1]})
    with pytest.raises(ConfigError, match="soft cap"):
        model(**batch, softcap=30.0)


def test_what_changes_nothing_of_a_row_is_left_aside() -> None:
    aside = {
        **{"text": "one two", "id": 7, "length": [2], "token_type_ids": [0, 0], "labels": None, "task": None},
        **{"special_tokens_mask": [1, 0], "offset_mapping": [(0, 3), (3, 7)], "overflow_to_sample_mapping": 3},
        **{"messages": [{"role": "user"}], "tags": ["a", "b"], "meta": {"source": 3}, "score": 0.5, "label": 1},
        **{"names": np.array(["a", "b"]), "ragged": [["a", "b"], ["c"]], "none": np.array([]), "pairs": [("a", "b")]},
        **{"is_first": True, "raw": b"ab", "attention_mask": [1.0, 1.0], "loss_mask": np.ones(2)},
    }
    plain = PackingCollator().pack([{"input_ids": [1, 2]}])
    assert np.array_equal(PackingCollator().pack([{"input_ids": [1, 2], **aside}]).labels, plain.labels)


def test_a_data_loader_takes_it_with_worker_processes() -> None:
    from torch.utils.data import DataLoader

    loader = DataLoader(documents(), batch_size=3, collate_fn=PackingCollator(max_tokens=20), num_workers=1)
    assert sum(int(batch["input_ids"].count_nonzero()) for batch in loader) == sum(
        int(np.count_nonzero(d["input_ids"])) for d in documents()
    )


@pytest.mark.parametrize(
    ("features", "says"),
    [
        ([], "no features"),
        ([{"labels": [1]}], "feature 0 has labels but no input_ids"),
        ([{"input_ids": [1]}, {"input_ids": []}], "document 1 has 0 tokens"),
        ([{"input_ids": list(range(9))}], "document 0 has 9 tokens but a row has 8"),
        ([{"input_ids": [1, 2], "labels": [1]}], "labels of feature 0 has 1 entries but input_ids has 2"),
        ([{"input_ids": [1, 2], "loss_mask": [1]}], "loss_mask of feature 0"),
        ([{"input_ids": [[1, 2]]}], "flat sequence"),
        ([{"input_ids": [1.5]}], "flat sequence"),
        ([{"input_ids": [1, 0], "attention_mask": [1, 0]}], "padded already"),
        *(
            ([{"input_ids": [1, 2], name: value}], f"feature 0 has {name}, for which packed rows have no place: remove")
            for name, value in [
                ("completion_mask", [0, 1]),
                ("assistant_masks", [0, 1]),
                ("token_type_ids", [0, 1]),
                ("pixel_values", np.zeros((3, 4))),
                ("loss_weight", 0.5),
                ("seq_lengths", [1, 1]),
                ("frames", [[0.1, 0.2]]),
                ("ragged", [[1], [2, 3]]),
                ("tensors", [torch.zeros(3)]),
                ("numbers", {1, 2}),
            ]
        ),
        ([[1, 2, 3]], "feature 0 is of type list: give a mapping with input_ids"),
        ([{"input_ids": torch.ones(2, dtype=torch.bfloat16)}], "input_ids of feature 0 is no array"),
        ([{"input_ids": [[1], [1, 2]]}], "input_ids of feature 0 is no array"),
        ([{"input_ids": np.array([1, 2**63 + 5], np.uint64)}], "has 9223372036854775813: integers here have"),
        ([{"input_ids": [5, -5]}], "input_ids of feature 0 has -5: give ids from 0"),
        ([{"input_ids": [5, IGNORED]}], "input_ids of feature 0 has -100"),
        ([{"input_ids": [True, False]}], "type bool: a flat sequence"),
        ([{"input_ids": [5, 6], "labels": [IGNORED, -1]}], "labels of feature 0 has -1"),
        ([{"input_ids": [1, 2], "position_ids": [5, 6]}], "has position_ids of its own"),
    ],
)
def test_a_feature_that_cannot_be_packed_is_refused_by_name(features: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        PackingCollator(max_tokens=10, pad_multiple=4).pack(features)


@pytest.mark.parametrize(
    "settings",
    [
        {"attention": "flash"},
        {"packing": "first-fit"},
        {"pad_multiple": 0},
        {"max_tokens": 4, "pad_multiple": 8},
        {"max_tokens": "8"},
        {"max_tokens": 7.5},
        {"pad_token_id": -1},
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PackingCollator(**settings)

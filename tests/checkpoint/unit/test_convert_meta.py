"""Meta's Llama folder becomes the same model in Hugging Face's, however many ranks wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.tools.checkpoint.converter import convert, prepare_conversion
from dynapipe_ext.tools.checkpoint.formats import WriterOptions
from dynapipe_ext.tools.checkpoint.meta import folder as meta
from tests.support import meta_llama
from tests.support.checkpoints import tensors_in

TOKENS = torch.randint(meta_llama.VOCAB, (2, 20), generator=torch.Generator().manual_seed(1))


def converted(source: Path) -> Path:
    target = source.with_name(source.name + "-hf")
    convert(prepare_conversion(source, target, "hf", WriterOptions(), source_format="meta", verify=True))
    return target


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("llama3", [False, True], ids=["llama2", "llama3"])
def test_the_model_says_what_metas_arithmetic_says(ranks: int, llama3: bool, tmp_path: Path) -> None:
    whole = meta_llama.weights()
    theta = 500_000.0 if llama3 else 10_000.0
    params = {"rope_theta": theta} if llama3 else {}
    folder = converted(meta_llama.write(tmp_path / "meta", whole, ranks, llama3=llama3, **params))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        found = model(TOKENS, use_cache=False).logits
    wanted = meta_llama.reference_logits(whole, TOKENS, theta)
    assert wanted.std() > 1
    assert (found - wanted).abs().max() <= 2e-5
    assert model.config.max_position_embeddings == (8192 if llama3 else 4096)
    assert (folder / "tokenizer.model").read_bytes() == b"words"


def test_every_tensor_is_bit_equal_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    whole = {name: tensor.bfloat16() for name, tensor in meta_llama.weights().items()}
    folders = [converted(meta_llama.write(tmp_path / str(ranks), whole, ranks)) for ranks in (1, 2, 4, 8)]
    first, *others = (tensors_in(folder) for folder in folders)
    assert all(tensor.dtype == torch.bfloat16 for tensor in first.values())
    assert torch.equal(first["model.embed_tokens.weight"], whole["tok_embeddings.weight"])
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_equal_embeddings_are_tied_as_in_llama_3_2(tmp_path: Path) -> None:
    whole = meta_llama.weights()
    whole["output.weight"] = whole["tok_embeddings.weight"].clone()
    params = {"rope_theta": 500_000.0, "use_scaled_rope": True}
    reader = meta.open_checkpoint(meta_llama.write(tmp_path / "meta", whole, 2, **params))
    assert reader.architecture.tied_embeddings
    assert reader.architecture.rope_scaling is not None
    assert reader.architecture.rope_scaling.factor == 32.0
    assert "lm_head.weight" not in tensors_in(converted(tmp_path / "meta"))


def test_llama_3_1_stretches_by_eight(tmp_path: Path) -> None:
    folder = meta_llama.write(tmp_path / "meta", meta_llama.weights(), 1, rope_theta=5e5, use_scaled_rope=True)
    architecture = meta.open_checkpoint(folder).architecture
    assert architecture.rope_scaling is not None
    assert (architecture.rope_scaling.factor, architecture.max_seq_len) == (8.0, 131_072)


def test_a_tokenizer_beside_the_models_folders_is_found(tmp_path: Path) -> None:
    folder = meta_llama.write(tmp_path / "meta", meta_llama.weights(), 1)
    (folder / "tokenizer.model").rename(tmp_path / "tokenizer.model")
    assert (converted(folder) / "tokenizer.model").read_bytes() == b"words"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda parts: parts.pop("layers.1.attention.wk.weight"), r"consolidated.01.pth: layers.1.attention.wk.weight"),
        (lambda parts: parts.update(more=torch.ones(3)), r"consolidated.01.pth: more \[3\] is extra"),
        (
            lambda parts: parts.update({"layers.0.feed_forward.w2.weight": torch.ones(5, 5)}),
            r"layers.0.feed_forward.w2.weight is \[5, 5\], not \[64, 48\]",
        ),
        (lambda parts: parts["norm.weight"].add_(1), "norm.weight is not that of the other ranks"),
    ],
    ids=["missing", "extra", "misshapen", "unequal"],
)
def test_what_is_wrong_in_one_ranks_file_is_named(change: Any, says: str, tmp_path: Path) -> None:
    folder = meta_llama.write(tmp_path / "meta", meta_llama.weights(), 2)
    file = folder / "consolidated.01.pth"
    parts = torch.load(file, weights_only=True)
    change(parts)
    torch.save(parts, file)
    with pytest.raises(DataError, match=says):
        converted(folder)
    assert not list(tmp_path.glob("*-hf*"))


def test_a_rank_whose_file_is_absent_is_named(tmp_path: Path) -> None:
    folder = meta_llama.write(tmp_path / "meta", meta_llama.weights(), 4)
    (folder / "consolidated.02.pth").unlink()
    with pytest.raises(DataError, match=r"lacks consolidated\.02\.pth"):
        meta.open_checkpoint(folder)


def test_the_last_rank_that_is_absent_shows_in_the_shapes(tmp_path: Path) -> None:
    folder = meta_llama.write(tmp_path / "meta", meta_llama.weights(), 4)
    for rank in (2, 3):
        (folder / f"consolidated.{rank:02d}.pth").unlink()
    with pytest.raises(DataError, match="not"):
        meta.open_checkpoint(folder).check()


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"vision_chunk_size": 448}, "vision_chunk_size"),
        ({"dim": "64"}, "dim is '64' but must be an integer"),
        ({"n_heads": 7}, "no even width of a head"),
    ],
)
def test_params_that_cannot_be_are_refused_by_name(params: dict[str, Any], says: str, tmp_path: Path) -> None:
    folder = meta_llama.write(tmp_path / "meta", meta_llama.weights(), 1, **params)
    with pytest.raises(ConfigError, match=says):
        meta.open_checkpoint(folder)

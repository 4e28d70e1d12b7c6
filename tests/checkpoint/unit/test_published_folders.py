"""Folders as their makers publish them: FP8 and MXFP4 weights, shards without an index, one consolidated file, a mark
of the byte order. Each reads as the plain model that it stands for."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.models.huggingface import read_config
from dynapipe_ext.models.named_models import read_model
from dynapipe_ext.tools.checkpoint.converter import ConversionOutcome, convert, prepare_conversion
from dynapipe_ext.tools.checkpoint.files.safetensors_file import read_header
from dynapipe_ext.tools.checkpoint.formats import WriterOptions
from dynapipe_ext.tools.checkpoint.huggingface.quantized import dequantised
from dynapipe_ext.tools.checkpoint.meta import folder as meta
from tests.support import meta_llama
from tests.support.checkpoints import differences, edit_json, saved, tensors_in, tiny

Tensors = dict[str, torch.Tensor]
_BLOCK = 32  # of the tiny model: its sides are not all multiples of it


def resaved(source: Path, target: Path, source_format: str = "") -> ConversionOutcome:
    options = WriterOptions()
    return convert(prepare_conversion(source, target, "hf", options, source_format=source_format, verify=True))


def quantised(tensors: Tensors, block: int) -> tuple[Tensors, Tensors]:
    """Layers' matrices but the routers' as FP8 with a scale a block (0: one for all), and what a plain loop reads."""
    stored, plain = {}, {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or ".layers." not in name or name.endswith("mlp.gate.weight"):
            stored[name] = plain[name] = tensor
            continue
        side = block or max(tensor.shape)
        scales = torch.empty(-(-tensor.shape[0] // side), -(-tensor.shape[1] // side))
        values, read = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn), torch.empty_like(tensor)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                place = slice(i * side, (i + 1) * side), slice(j * side, (j + 1) * side)
                scales[i, j] = tensor[place].float().abs().max() / 448
                values[place] = (tensor[place].float() / scales[i, j]).to(values.dtype)
                read[place] = (values[place].float() * scales[i, j]).bfloat16()
        stored |= {name: values, f"{name}_scale_inv": scales if block else scales.view(1)}
        plain[name] = read
    return stored, plain


def fp8_folder(folder: Path, block: int = _BLOCK, **method: Any) -> tuple[Path, Tensors, Tensors]:
    """A tiny DeepSeek-V3 as it is published, its tensors as stored, and as they are to be read."""
    saved(tiny("deepseek_v3", dtype=torch.bfloat16), folder, shard_size="1GB")
    stored, plain = quantised(tensors_in(folder), block)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    sides = [block, block] if block else None
    edit_json(
        folder / "config.json",
        quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": sides, **method},
    )
    return folder, stored, plain


@pytest.mark.parametrize("block", [_BLOCK, 0], ids=["blocks", "one-scale"])
def test_fp8_weights_are_read_as_a_plain_loop_reads_them(block: int, tmp_path: Path) -> None:
    source, stored, plain = fp8_folder(tmp_path / "fp8", block)
    outcome = resaved(source, tmp_path / "plain")
    assert differences(plain, tensors_in(tmp_path / "plain")) == []
    scales = [name for name in stored if name.endswith("_scale_inv")]
    assert len(scales) > 20
    assert f"{len(scales)} tensors of quant_method fp8 are read as bfloat16" in outcome.notices
    raw = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "quantization_config" not in raw
    assert read_config(raw).dtype == "bfloat16"


def test_an_fp8_folder_names_its_model_and_becomes_megatrons(tmp_path: Path) -> None:
    source, _, plain = fp8_folder(tmp_path / "fp8")
    assert read_model(str(source))[0].family == "deepseek_v3"
    options = WriterOptions(tp=2, pp=2)
    convert(prepare_conversion(source, tmp_path / "megatron", "megatron", options, verify=True))
    resaved(tmp_path / "megatron", tmp_path / "plain")
    assert differences(plain, tensors_in(tmp_path / "plain")) == []


def test_scales_of_activations_are_left_out_by_number(tmp_path: Path) -> None:
    source, stored, plain = fp8_folder(tmp_path / "fp8", 0, activation_scheme="static")
    more = {name.replace("weight_scale_inv", "activation_scale"): torch.ones(1) for name in stored if "_inv" in name}
    save_file(stored | more, source / "model.safetensors", {"format": "pt"})
    outcome = resaved(source, tmp_path / "plain")
    assert differences(plain, tensors_in(tmp_path / "plain")) == []
    assert any(f"{len(more)} scales of activations are left out" in notice for notice in outcome.notices)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda stored, name: stored.pop(f"{name}_scale_inv"), "o_proj.weight stored as torch.float8_e4m3fn"),
        (
            lambda stored, name: stored.update({f"{name}_scale_inv": torch.ones(7, 1)}),
            r"o_proj.weight has scales \[7, 1\], not \[2, 3\]",
        ),
        (
            lambda stored, name: stored.update({name: stored[name].bfloat16()}),
            "stored as torch.bfloat16, not as float8",
        ),
    ],
    ids=["no-scale", "misshapen", "plain"],
)
def test_scales_that_do_not_belong_to_their_weights_are_named(change: Any, says: str, tmp_path: Path) -> None:
    source, stored, _ = fp8_folder(tmp_path / "fp8")
    change(stored, "model.layers.1.self_attn.o_proj.weight")
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=says):
        resaved(source, tmp_path / "plain")


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", None])
def test_weights_of_other_methods_are_refused_by_name(method: str | None, tmp_path: Path) -> None:
    source = fp8_folder(tmp_path / "other", quant_method=method)[0]
    with pytest.raises(ConfigError, match=f"weights of quant_method {method!r} are not read, only those of fp8 and"):
        resaved(source, tmp_path / "plain")


def test_blocks_of_no_size_are_refused(tmp_path: Path) -> None:
    source = fp8_folder(tmp_path / "fp8", weight_block_size=[128, 0])[0]
    with pytest.raises(DataError, match=r"weight_block_size is \[128, 0\]"):
        resaved(source, tmp_path / "plain")


def test_mxfp4_weights_are_those_of_transformers(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 10, 4, 16), dtype=torch.uint8, generator=random)
    scales = torch.randint(90, 160, (3, 10, 4), dtype=torch.uint8, generator=random)
    name, file = "model.layers.0.mlp.experts.down_proj", tmp_path / "model.safetensors"
    save_file({f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": torch.ones(3, 10)}, file)
    tensors, faults, notices = dequantised(read_header(file), {"quant_method": "mxfp4"}, file)
    assert (faults, sorted(tensors)) == ([], [name, f"{name}_bias"])
    read, oracle = tensors[name].read(), convert_moe_packed_tensors(blocks, scales)
    assert (tensors[name].shape, tensors[name].dtype) == ((3, 128, 10), torch.bfloat16)
    assert read.dtype == oracle.dtype
    assert torch.equal(read, oracle)
    assert notices == ("1 tensors of quant_method mxfp4 are read as bfloat16",)


def test_mxfp4_blocks_beside_other_scales_are_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"x_blocks": torch.zeros(3, 10, 4, 16, dtype=torch.uint8), "x_scales": torch.zeros(3, 10)}, file)
    _, faults, _ = dequantised(read_header(file), {"quant_method": "mxfp4"}, file)
    assert faults == ["x stored as torch.uint8 with scales torch.float32, not as uint8 both"]


@pytest.mark.parametrize("model", [True, False], ids=["safetensors", "bin"])
def test_shards_without_an_index_are_read_and_named(model: bool, origin: Path, wanted: Tensors, tmp_path: Path) -> None:
    source = copied_config(origin, tmp_path / "source")
    for number, names in enumerate((sorted(wanted)[::2], sorted(wanted)[1::2]), start=1):
        part = {name: wanted[name] for name in names}
        if model:
            save_file(part, source / f"model-{number:05d}-of-00002.safetensors", {"format": "pt"})
        else:
            torch.save(part, source / f"pytorch_model-{number:05d}-of-00002.bin")
    outcome = resaved(source, tmp_path / "target")
    assert differences(wanted, tensors_in(tmp_path / "target")) == []
    (notice,) = (notice for notice in outcome.notices if "no index of its 2 shards" in notice)
    assert "model-00001-of-00002" in notice
    assert "model-00002-of-00002" in notice
    next(source.glob("*model-00001*")).unlink()
    with pytest.raises(DataError, match="has no index and lacks shards 00001 of 2"):
        resaved(source, tmp_path / "again")


def test_shards_of_two_models_without_an_index_are_refused(origin: Path, wanted: Tensors, tmp_path: Path) -> None:
    source = copied_config(origin, tmp_path / "source")
    for name in ("model-00001-of-00001.safetensors", "model-00001-of-00002.safetensors"):
        save_file(wanted, source / name, {"format": "pt"})
    with pytest.raises(DataError, match="shards of several models and no index"):
        resaved(source, tmp_path / "target")


def test_one_consolidated_file_is_read(origin: Path, wanted: Tensors, tmp_path: Path) -> None:
    source = copied_config(origin, tmp_path / "source")
    save_file(wanted, source / "consolidated.safetensors", {"format": "pt"})
    outcome = resaved(source, tmp_path / "target")
    assert differences(wanted, tensors_in(tmp_path / "target")) == []
    assert "the weights are read from consolidated.safetensors" in outcome.notices


def test_a_consolidated_file_of_mistrals_names_is_read_by_its_params(tmp_path: Path) -> None:
    whole = {name: tensor.bfloat16() for name, tensor in meta_llama.weights().items()}
    many = meta_llama.write(tmp_path / "meta", whole, 2)
    one = tmp_path / "one"
    one.mkdir()
    save_file(whole, one / "consolidated.safetensors", {"format": "pt"})
    params = json.loads((many / "params.json").read_text())
    width = whole["layers.0.feed_forward.w1.weight"].shape[0]
    params |= {"hidden_dim": width, "head_dim": params["dim"] // params["n_heads"], "sliding_window": 16}
    (one / "params.json").write_text(json.dumps(params))
    architecture = meta.open_checkpoint(one).architecture
    assert (architecture.family, architecture.sliding_window, architecture.max_seq_len) == ("mistral", 16, 32_768)
    resaved(one, tmp_path / "one-hf")
    resaved(many, tmp_path / "many-hf")
    assert differences(tensors_in(tmp_path / "many-hf"), tensors_in(tmp_path / "one-hf")) == []
    (one / "params.json").rename(one / "config.json")
    with pytest.raises(ConfigError, match="model_type is None"):
        resaved(one, tmp_path / "again")
    edit_json(one / "config.json", **json.loads((tmp_path / "one-hf" / "config.json").read_text()))
    with pytest.raises(DataError, match=r"as Meta and Mistral do: put params\.json there"):
        resaved(one, tmp_path / "again")


def test_a_config_with_a_byte_order_mark_is_read_and_written_without(origin: Path, tmp_path: Path) -> None:
    source = copied_config(origin, tmp_path / "source")
    save_file(tensors_in(origin), source / "model.safetensors", {"format": "pt"})
    plain = (source / "config.json").read_bytes()
    (source / "config.json").write_bytes(codecs.BOM_UTF8 + plain)
    resaved(source, tmp_path / "target")
    assert json.loads((tmp_path / "target" / "config.json").read_text()) == json.loads(plain)
    assert read_model(str(source))[0] == read_model(str(tmp_path / "target"))[0]
    convert(prepare_conversion(source, tmp_path / "megatron", "megatron", WriterOptions(), verify=True))
    resaved(tmp_path / "megatron", tmp_path / "back")


def copied_config(origin: Path, folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_bytes((origin / "config.json").read_bytes())
    return folder

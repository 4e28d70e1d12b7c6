"""What DeepSpeed checkpoints look like besides what one engine writes today: names, wrappers, optimizers, layers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dynapipe_ext.errors import DataError
from dynapipe_ext.models.tensors import tensor_groups
from dynapipe_ext.tools.checkpoint.deepspeed.contents import plain_number
from dynapipe_ext.tools.checkpoint.deepspeed.reader import DeepSpeedReader, open_checkpoint
from dynapipe_ext.tools.checkpoint.files import stored_tensor
from dynapipe_ext.tools.checkpoint.recognition import is_deepspeed
from tests.support.checkpoints import VARIANTS, differences, saved, tensors_in, tiny, tiny_variant

SMALL = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 11,
}  # fmt: skip


def module_file(folder: Path, model: Any, module: Mapping[str, Any], **fields: Any) -> Path:
    """A tag with the module alone, as stages 0 to 2 save it, and the model's configuration beside `latest`."""
    (folder / "step1").mkdir(parents=True, exist_ok=True)
    (folder / "latest").write_text("step1")
    model.config.save_pretrained(folder)
    tree = {"module": dict(module), "buffer_names": [], "param_shapes": None, "global_steps": 1, **fields}
    torch.save(tree, folder / "step1" / "mp_rank_00_model_states.pt")
    return folder


def weights(reader: DeepSpeedReader, kind: Any = "weight") -> dict[str, torch.Tensor]:
    reader.check()
    found: dict[str, torch.Tensor] = {}
    for group in tensor_groups(reader.architecture):
        found |= reader.read(group, kind)
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_familys_module_is_read_under_the_hubs_names(variant: str, tmp_path: Path) -> None:
    model = tiny_variant(variant)
    hub = tensors_in(saved(model, tmp_path / "hf"))
    reader = open_checkpoint(module_file(tmp_path / "ds", model, model.state_dict()))
    assert differences(weights(reader), hub) == []
    assert reader.kinds == ("weight",)
    assert reader.notices == ("no optimizer files are there: the weights alone are carried",)


@pytest.mark.parametrize("variant", ["mixtral", "gpt2"])
def test_names_of_older_transformers_are_read(variant: str, tmp_path: Path) -> None:
    """Version 4 keeps experts apart, as the Hub does; a module below the head has no `transformer.`."""
    model = tiny_variant(variant)
    hub = tensors_in(saved(model, tmp_path / "hf"))
    old = {name.removeprefix("transformer."): tensor for name, tensor in hub.items()}
    assert differences(weights(open_checkpoint(module_file(tmp_path / "ds", model, old))), hub) == []


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module.module.", "_orig_mod.module."])
def test_wrappers_are_taken_off(prefix: str, tmp_path: Path) -> None:
    model = tiny("llama", **SMALL)
    wrapped = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    wrapped = {name.replace("mlp.", "mlp._checkpoint_wrapped_module."): tensor for name, tensor in wrapped.items()}
    assert differences(weights(open_checkpoint(module_file(tmp_path, model, wrapped))), model.state_dict()) == []


def test_buffers_are_left_out_and_said_but_nothing_else_is(tmp_path: Path) -> None:
    model = tiny("llama", **SMALL)
    buffers = {
        "model.rotary_emb.inv_freq": torch.ones(4),
        "model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    reader = open_checkpoint(module_file(tmp_path, model, model.state_dict() | buffers))
    assert differences(weights(reader), model.state_dict()) == []
    assert any("2 buffers are no weights and are left out" in notice for notice in reader.notices)
    extra = {"model.layers.0.lora.weight": torch.ones(2, 3)}
    with pytest.raises(DataError, match=r"model.layers.0.lora.weight \[2, 3\] is extra"):
        open_checkpoint(module_file(tmp_path, model, model.state_dict() | extra)).check()


def test_a_weight_that_is_no_float_is_refused(tmp_path: Path) -> None:
    model = tiny("llama", **SMALL)
    changed = {"model.norm.weight": torch.ones(16, dtype=torch.int64)}
    with pytest.raises(DataError, match=r"model.norm.weight stored as torch.int64, not as one of float32"):
        open_checkpoint(module_file(tmp_path, model, model.state_dict() | changed)).check()


def zero_files(folder: Path, model: Any, state: Mapping[str, Any] | None = None, **fields: Any) -> Path:
    """A tag of ZeRO-1 on two ranks, with masters of 2 x the weights, and `state` as each rank's optimizer state."""
    parameters = dict(model.named_parameters())
    flat = 2 * torch.cat([parameter.detach().flatten() for parameter in parameters.values()])
    padded = torch.cat([flat, torch.zeros(-len(flat) % 4)])
    shapes = [{name: parameter.shape for name, parameter in parameters.items()}]
    shared = {"lm_head.weight": "model.embed_tokens.weight"} if model.config.tie_word_embeddings else {}
    module_file(folder, model, model.state_dict(), param_shapes=shapes, shared_params=shared)
    for rank, part in enumerate(padded.chunk(2)):
        entry = {key: part if value is Ellipsis else value for key, value in (state or {}).items()}
        optimizer = {
            "zero_stage": 1,
            "partition_count": [2],
            "single_partition_of_fp32_groups": [part[: len(flat) - rank * len(part)].clone()],
            "base_optimizer_state": {"state": {0: entry}, "param_groups": [{"lr": 0.5, "params": [0]}]},
            **fields,
        }
        torch.save(
            {"optimizer_state_dict": optimizer}, folder / "step1" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        )
    return folder


def test_moments_keep_their_padding_and_masters_do_not(tmp_path: Path) -> None:
    model = tiny("llama", **SMALL, tie_word_embeddings=True)
    folder = zero_files(tmp_path, model, {"step": 7, "exp_avg": ..., "exp_avg_sq": ...})
    reader = open_checkpoint(folder)
    expected = {name: 2 * p.detach() for name, p in model.named_parameters()}
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        assert differences(weights(reader, kind), expected) == []
    assert reader.state is not None
    assert (reader.state.optimizer_step, reader.state.param_groups) == (7, ({"lr": 0.5},))


@pytest.mark.parametrize("kind", ["weight", "master", "exp_avg"])
def test_a_group_costs_its_own_bytes_and_opening_costs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    folder = zero_files(tmp_path, tiny("llama", **SMALL), {"step": 1, "exp_avg": ..., "exp_avg_sq": ...})
    read: list[int] = []
    fill = stored_tensor._fill
    monkeypatch.setattr(stored_tensor, "_fill", lambda file, buffer: read.append(len(buffer)) or fill(file, buffer))
    reader = open_checkpoint(folder)
    reader.check()
    assert read == []
    for group in tensor_groups(reader.architecture):
        read.clear()
        reader.read(group, kind)
        assert sum(read) == 4 * group.size


def test_an_elastic_checkpoint_has_states_without_a_wrapper(tmp_path: Path) -> None:
    model = tiny("llama", **SMALL)
    folder = zero_files(tmp_path, model)
    for path in (folder / "step1").glob("*_optim_states.pt"):
        tree = torch.load(path)
        inner = tree["optimizer_state_dict"]
        part = inner["single_partition_of_fp32_groups"][0]
        inner |= {"base_optimizer_state": [{"exp_avg": part, "exp_avg_sq": part}], "base_optimizer_state_step": 5}
        torch.save(tree, path)
    reader = open_checkpoint(folder)
    assert reader.kinds == ("weight", "master", "exp_avg", "exp_avg_sq")
    assert reader.state is not None
    assert reader.state.optimizer_step == 5


def test_state_of_another_optimizer_than_adam_stays_behind_and_is_named(tmp_path: Path) -> None:
    folder = zero_files(tmp_path, tiny("llama", **SMALL), {"momentum_buffer": ...})
    reader = open_checkpoint(folder)
    reader.check()
    assert reader.kinds == ("weight", "master")
    assert any("momentum_buffer are not Adam's moments and stay behind" in notice for notice in reader.notices)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"zero_stage": 9}, "ZeRO stage 9 is not known"),
        ({"partition_count": [2, 1]}, r"cut over \['1', '2'\] ranks: expert parallelism"),
        ({"partition_count": [4]}, "optimizer states of 4 ranks are needed but rank 2, 3 has none"),
        ({"partition_count": [1]}, "written by 1 ranks but there are also zero_pp_rank_1"),
        ({"single_partition_of_fp32_groups": []}, "0 groups of masters but the model file has 1"),
        ({"param_alignment_paddings": [[1, 2]]}, "does not have one number for each parameter"),
        ({"base_optimizer_state": 3}, "field 'base_optimizer_state' is 3 but must be a mapping"),
    ],
)
def test_optimizer_files_that_deepspeed_does_not_write_are_refused(
    tmp_path: Path, fields: dict[str, Any], says: str
) -> None:
    folder = zero_files(tmp_path, tiny("llama", **SMALL), {}, **fields)
    with pytest.raises(DataError, match=says):
        open_checkpoint(folder)


def test_several_groups_of_stage_0_stay_behind_because_nothing_names_them(tmp_path: Path) -> None:
    model = tiny("llama", **SMALL)
    optimizer = torch.optim.AdamW([{"params": [p for p in model.parameters() if p.ndim == d]} for d in (1, 2)])
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    reader = open_checkpoint(module_file(tmp_path, model, model.state_dict(), optimizer=optimizer.state_dict()))
    assert reader.kinds == ("weight",)
    assert any("does not name its parameters" in notice for notice in reader.notices)


def layers(folder: Path, model: Any, files: list[Mapping[str, torch.Tensor]]) -> Path:
    folder.mkdir(exist_ok=True)
    model.config.save_pretrained(folder)
    for i, tensors in enumerate(files):
        torch.save(dict(tensors), folder / f"layer_{i:02d}-model_00-model_states.pt")
    return folder


def below(model: Any, prefix: str, new: str = "") -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {new + name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}


@pytest.mark.parametrize("variant", ["llama", "llama-tied", "mixtral", "qwen3", "gpt2"])
def test_layer_files_of_a_pipeline_are_told_by_names_or_shapes(variant: str, tmp_path: Path) -> None:
    model = tiny_variant(variant)
    hub = tensors_in(saved(model, tmp_path / "hf"))
    state = model.state_dict()
    if variant == "gpt2":
        blocks = [below(model, f"transformer.h.{i}.", "block.") for i in range(4)]
        before = [{"wte.weight": state["transformer.wte.weight"], "wpe.weight": state["transformer.wpe.weight"]}]
        after = [below(model, "transformer.ln_f."), {"lm_head.weight": state["lm_head.weight"]}]
    else:
        blocks = [below(model, f"model.layers.{i}.") for i in range(4)]
        before = [{"weight": state["model.embed_tokens.weight"]}, {}]  # a layer without tensors, like dropout
        after = [{"norm.weight": state["model.norm.weight"], "lm_head.weight": state["lm_head.weight"]}]
    reader = open_checkpoint(layers(tmp_path / "ds", model, [*before, *blocks, *after]))
    assert differences(weights(reader), hub) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda files: files.pop(2), r"3 layer files hold a block of gpt2 .*config.json says 4"),
        (lambda files: files[1].pop("ln_1.bias"), r"3 layer files hold a block"),
        (
            lambda files: files[2].update({"adapter": torch.ones(2)}),
            r"transformer.h.1.adapter \[2\] is extra",
        ),
        (lambda files: files.insert(3, {"weight": torch.ones(64)}), r"layer_03.*lies between blocks but is none"),
        (
            lambda files: files[0].update({"a.weight": torch.ones(7, 5)}),
            r"what a.weight \[7, 5\] is cannot be told: before",
        ),
        (
            lambda files: files.pop(),
            r"transformer.ln_f.weight \[64\] is missing; transformer.ln_f.bias \[64\] is missing",
        ),
        (
            lambda files: files.append({"weight": torch.ones(131, 64)}),
            r"lm_head.weight differs from transformer.wte.weight",
        ),
    ],
)
def test_layers_that_cannot_be_placed_are_refused_by_name(tmp_path: Path, change: Any, says: str) -> None:
    model = tiny_variant("gpt2")
    embeddings = {f"{name}.weight": model.state_dict()[f"transformer.{name}.weight"] for name in ("wte", "wpe")}
    files = [embeddings, *[below(model, f"transformer.h.{i}.") for i in range(4)], below(model, "transformer.ln_f.")]
    change(files)
    with pytest.raises(DataError, match=says):
        open_checkpoint(layers(tmp_path, model, files)).check()


def test_pipelines_that_are_not_known_are_refused(tmp_path: Path) -> None:
    folder = layers(tmp_path / "t5", tiny_variant("t5"), [{"weight": torch.ones(1)}])
    with pytest.raises(DataError, match="a pipeline of a t5 model: the order of its layers is not known"):
        open_checkpoint(folder)
    folder = layers(tmp_path / "llama", tiny_variant("llama"), [{"weight": torch.ones(1)}])
    (folder / "layer_00-model_00-model_states.pt").rename(folder / "layer_00-model_01-model_states.pt")
    with pytest.raises(DataError, match="layers cut by tensor parallelism are not supported"):
        open_checkpoint(folder)


def test_a_tag_is_told_from_what_is_none(tmp_path: Path) -> None:
    model = tiny("llama", **SMALL)
    folder = module_file(tmp_path / "ds", model, model.state_dict())
    assert is_deepspeed(folder)
    assert is_deepspeed(folder / "step1")
    (tmp_path / "mp_rank_00").mkdir()  # as Megatron names folders
    assert not is_deepspeed(tmp_path)
    (folder / "latest").write_text("../ds/step1")
    assert not is_deepspeed(folder)
    with pytest.raises(DataError, match="latest names no folder with"):
        open_checkpoint(folder)


def test_plain_values_are_walked_once_and_never_in_circles() -> None:
    laughs: list[Any] = [1.0]
    for _ in range(100):
        laughs = [laughs, laughs]
    circle: list[Any] = [1]
    circle.append(circle)
    deep: Any = ()
    for _ in range(100_000):
        deep = (deep,)
    assert plain_number({"a": (1, [2.5, None]), "b": object(), 3: True}) == {"a": (1, [2.5, None]), "b": None, 3: True}
    walked = plain_number(laughs)
    assert walked[0] is walked[1]
    assert plain_number(circle) == [1, None]
    assert plain_number(deep) is None

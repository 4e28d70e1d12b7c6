"""A ds_config.json in the terms of a run, and what an engine is made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.settings.deepspeed_settings import make_engine_config, read_deepspeed_config
from dynapipe_ext.settings.tables import DeepSpeedSettings, OptimizerSettings
from dynapipe_ext.settings.train_config import TrainConfig

# As the documentation of transformers has it, word for word but for the offload of parameters.
AUTO: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": "auto",
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
SETTINGS = OptimizerSettings(lr=3e-5, min_lr=0.0, betas=(0.9, 0.95), weight_decay=0.1, warmup_steps=7)


def made(raw: dict[str, Any], *, compiles: bool = True, dtype: str = "bfloat16") -> Any:
    options: dict[str, Any] = {"hidden_size": 100, "num_steps": 50, "num_replicas": 4, "compiles": compiles}
    return make_engine_config(raw, SETTINGS, dtype=dtype, **options)


def test_every_auto_is_filled_in_and_nothing_counts_as_overridden() -> None:
    found = made(AUTO)
    assert found.overridden == ()
    assert "auto" not in json.dumps(found.config)
    assert found.config["optimizer"]["params"] == {"lr": 3e-5, "betas": [0.9, 0.95], "weight_decay": 0.1}
    assert found.config["scheduler"]["params"] == {
        "total_num_steps": 50, "warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 7
    }  # fmt: skip
    zero = found.config["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["stage3_prefetch_bucket_size"]) == (10_000, 9_000)
    assert zero["stage3_param_persistence_threshold"] == 1_000
    assert zero["overlap_comm"] is True
    assert found.config["bf16"]["enabled"] is True
    assert found.config["train_batch_size"] == 4


def test_rates_that_a_scheduler_names_itself_are_said_to_be_its_own() -> None:
    parameters = {"warmup_max_lr": 1e-3, "warmup_num_steps": "auto"}
    engine = made({"scheduler": {"type": "WarmupLR", "params": parameters}})
    assert engine.config["scheduler"]["params"] == {"warmup_max_lr": 1e-3, "warmup_num_steps": 7}
    assert engine.overridden == (
        "scheduler.params.warmup_max_lr: the file's, whatever --lr, --min-lr, --lr-schedule and --warmup say",
    )


def test_what_plans_and_settings_say_else_is_named_with_the_reason() -> None:
    raw = {
        "train_batch_size": 64,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": False, "check_grad_overflow": False},
        "zero_optimization": {"stage": 1, "overlap_comm": True, "compute_grad_norm": False},
        "checkpoint": {"load_universal": True},
    }
    assert made(raw).overridden == (
        "train_batch_size 64 -> 4 (plans cut batches)",
        "gradient_clipping 0.5 -> 1.0 (by [optimizer] clip_grad)",
        "bf16.enabled False -> True (by --dtype)",
        "bf16.check_grad_overflow False -> True (steps that are not finite are refused)",
        "zero_optimization.compute_grad_norm False -> True (steps that are not finite are refused)",
        "zero_optimization.overlap_comm True -> False (ZeRO 1 reduces once, after the last backward)",
        "checkpoint.load_universal True -> None (--resume goes on from the run's own checkpoints)",
    )


def test_without_a_compiler_torch_computes_adam_and_others_are_refused() -> None:
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    assert "torch_adam" not in made(adam).config["optimizer"]["params"]
    assert made(adam, compiles=False).config["optimizer"]["params"]["torch_adam"] is True
    assert made({}).config["optimizer"]["params"]["torch_adam"] is True  # nobody asked for DeepSpeed's own
    with pytest.raises(ConfigError, match=r"optimizer\.type Lion is compiled by DeepSpeed"):
        made({"optimizer": {"type": "Lion"}}, compiles=False)


def test_the_file_decides_what_neither_flags_nor_toml_say(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    parameters = {"lr": 1e-3, "betas": [0.8, 0.99], "weight_decay": 0.2}
    file = {"bf16": {"enabled": True}, "optimizer": {"params": parameters}, "zero_optimization": {"stage": 2}}
    path.write_text(json.dumps(file))
    config = TrainConfig().with_values(deepspeed={"config": str(path)}, optimizer={"weight_decay": 0.3})
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.betas, optimizer.weight_decay) == (1e-3, (0.8, 0.99), 0.3)
    assert optimizer.clip_grad == 0.0  # DeepSpeed's default, which a file without a word means
    assert (config.model.dtype, config.deepspeed.zero_stage) == ("bfloat16", 2)
    assert TrainConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("stage", "optimizer", "weights", "offload"),
    [
        (3, {"device": "cpu"}, {"device": "nvme"}, "all"),
        (3, {"device": "none"}, {"device": "cpu"}, "weights"),
        (2, {"device": "cpu", "pin_memory": True}, {"device": "cpu"}, "optimizer"),  # DeepSpeed passes over the latter
        (3, {"device": "cpu", "ratio": 0.5}, {}, "none"),  # half of it is on the device
        (1, None, None, "none"),
        (0, {"device": "cpu"}, {}, "none"),
    ],
)
def test_what_an_engine_leaves_on_the_host_is_read_of_its_stage(
    stage: int, optimizer: Any, weights: Any, offload: str
) -> None:
    zero = {"stage": stage, "offload_optimizer": optimizer, "offload_param": weights}
    settings = DeepSpeedSettings(described={"zero_optimization": zero})
    assert settings.offload == offload
    assert settings.offloads_optimizer == (bool(stage) and (optimizer or {}).get("device") == "cpu")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot be read as a DeepSpeed configuration"),
        ("[]", "not a DeepSpeed configuration: give a JSON object"),
        ('{"bf16": true}', "bf16 is True but must be an object"),
        ('{"zero_optimization": {"stage": "3"}}', r"stage is '3' but must be 0, 1, 2 or 3"),
        ('{"elasticity": {"enabled": true}}', "elasticity is enabled.*with --resume"),
        ('{"tensor_parallel": {"autotp_size": 2}}', "tensor_parallel cuts the model"),
        ('{"checkpoint": 3}', "checkpoint is 3 but must be an object"),
        ('{"zero_optimisation": {"stage": 2}}', "zero_optimisation is unknown.*did you mean zero_optimization"),
        ('{"bfloat16": {"enabled": true}}', "bfloat16 is the old name of a section: write bf16"),
        ('{"zero_optimization": {"stage": 2, "offload_optimizer": true}}', "offload_optimizer is True but must be an"),
        ('{"bf16": {"enabled": "yes"}}', "bf16.enabled is 'yes' but must be true, false"),
        ('{"gradient_clipping": "high"}', "gradient_clipping is 'high' but must be a number"),
        ('{"scheduler": {"params": null}}', "scheduler.params is None but must be an object"),
        ('{"optimizer": {"type": "AdamW", "parameters": {}}}', "optimizer.parameters is unknown to DeepSpeed: write"),
        ('{"optimizer": {"params": {"lr": "fast"}}}', "params.lr is 'fast' but must be a number"),
        ('{"optimizer": {"params": {"betas": 0.9}}}', "betas is 0.9 but must be two numbers"),
    ],
)
def test_a_file_that_no_run_can_follow_is_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_deepspeed_config(tmp_path / "ds.json")

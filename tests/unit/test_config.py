"""Settings come from TOML as plain values; what no run can work with is refused with its table and name."""

import argparse
import json
import math
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynapipe_ext.errors import ConfigError, short
from dynapipe_ext.launch.job import requested
from dynapipe_ext.launch.job.configured import architecture_of
from dynapipe_ext.launch.job.saved_settings import describe_losses
from dynapipe_ext.launch.run.page import read_settings
from dynapipe_ext.models.named_models import read_model
from dynapipe_ext.settings.removed import translate_saved
from dynapipe_ext.settings.train_config import TrainConfig, list_tables
from dynapipe_ext.tools.files import toml_of

QUICKSTART = Path("launch/configs/quickstart.toml")


def from_toml(tmp_path: Path, text: str) -> TrainConfig:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    return TrainConfig.read(path)


def test_the_quickstart_file_is_the_default_run_but_for_what_shows_a_pipeline(root: Path) -> None:
    """Its lines that differ say what the default is."""
    assert TrainConfig.read(root / QUICKSTART) == TrainConfig().with_values(
        run={"steps": 12},
        topology={"tp": 1, "pp": 4, "placement": "v"},
        model={"num_layers": 8},
        plan={"max_tokens": 1024, "split_backward": True},
    )
    text = (root / QUICKSTART).read_text()
    assert len(re.findall(r"\(default: .*\)|\(the default\)", text)) == 7


def test_a_byte_order_mark_is_no_setting(tmp_path: Path) -> None:
    assert from_toml(tmp_path, "\ufeff[run]\nsteps = 7\n").run.steps == 7


def test_the_quickstart_file_spells_out_every_setting(root: Path) -> None:
    raw = tomllib.loads((root / QUICKSTART).read_text())
    assert {table: set(values) for table, values in raw.items()} == {
        table: set(values) for table, values in TrainConfig().to_json().items()
    }


def test_an_empty_file_is_the_default_run(tmp_path: Path) -> None:
    assert from_toml(tmp_path, "") == TrainConfig()


def test_settings_survive_toml_and_json(tmp_path: Path) -> None:
    config = from_toml(
        tmp_path,
        """
        [run]
        steps = 7
        [topology]
        pp = 3
        layers_per_stage = [1.5, 0.5, 2.0]
        [data]
        tokens_per_batch = 0
        batch_size = 12
        [plan]
        memory_limit_gb = 2
        layout = "padded"
        """,
    )
    assert (config.run.steps, config.topology.layers_per_stage, config.data.batch_size) == (7, (1.5, 0.5, 2), 12)
    assert isinstance(config.plan.memory_limit_gb, float)
    assert config.run == replace(TrainConfig().run, steps=7)
    assert TrainConfig.from_json(config.to_json()) == config
    assert json.dumps(config.topology.layers_per_stage) == "[1.5, 0.5, 2]"  # whole numbers as ever


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[runs]\nsteps = 1", r"unknown \['runs'\]; known are .*'run'"),
        ("[run]\nstep = 1", r"\[run\]: unknown \['step'\]; known are .*'steps'"),
        ("run = 3", r"run must be a table like \[run\]"),
        ('[run]\nsteps = "many"', r"\[run\] steps is 'many' but must be of type int"),
        ("[run]\nsteps = true", r"\[run\] steps is True but must be of type int"),
        ("[run]\nsteps = 1.5", r"\[run\] steps is 1\.5 but must be of type int"),
        ("[model]\ndropout = true", r"\[model\] dropout is True but must be of type float"),
        ("[job]\nstrict = 1", r"\[job\] strict is 1 but must be of type bool"),
        ('[topology]\nlayers_per_stage = ["2"]', r"layers_per_stage is \['2'\] but must be a list of numbers"),
        ("[topology]\nlayers_per_stage = [1.75, 2.25]", r"layers_per_stage \(1.75, 2.25\) has 1.75: .* in halves"),
        ("[topology]\nlayers_per_stage = 2", r"layers_per_stage is 2 but must be a list of numbers"),
        ('[topology]\nplacement = "w"', r"placement is 'w': choose from .*auto"),
        ("[topology]\nstages_per_rank = 2", r"stages_per_rank was removed: .* name more stages by layers_per_stage"),
        ("[topology]\nlayers_per_stage = [1, 1, 1, 1]", r"placement linear of 2 stages .*linear has 1 stage per rank"),
        (
            '[topology]\nplacement = "v"\nlayers_per_stage = [1, 1, 1, 1, 1, 1]',
            r"placement v of 3 stages .*an even number",
        ),
        ('[topology]\nplacement = "v"\npp = 1', r"placement v of 2 stages on each of 1 ranks"),
        (
            '[topology]\nplacement = "auto"\nlayers_per_stage = [1, 3]',
            r"placement is 'auto', which chooses layers_per_stage, but that is \(1, 3\)",
        ),
        (
            '[topology]\nplacement = "v"\n[plan]\nschedule = "1f1b"',
            r"schedule '1f1b' is for one stage a rank, but the placement is \(0, 1, 1, 0\) .*take placement 'linear'",
        ),
        (
            '[topology]\nplacement = "linear"\n[plan]\nschedule = "interleaved-1f1b"',
            r"'interleaved-1f1b' is for interleaved stages, but .*\(linear\): take placement 'interleaved'",
        ),
        (
            '[topology]\nlayers_per_stage = [1, 1, 1, 1, 1, 1, 1, 1]\n[plan]\nschedule = "zb-v"',
            r"'zb-v' is for two stages a rank in a V, but the placement is .*v, 4 stages a rank",
        ),
        ('[topology]\npp = 1\n[plan]\nschedule = "v-half"', r"placement v of 2 stages on each of 1 ranks"),
        (
            '[topology]\nplacement = "auto"\n[plan]\nschedule = "zb-v"',
            r"placement is 'auto', but schedule 'zb-v' runs under only one, v: leave placement out",
        ),
        ('[plan]\nlayout = "rolled"', r"layout is 'rolled': choose from padded, packed"),
        ('[plan]\nschedule = "2f2b"', r"schedule is '2f2b': choose from adaptive, .*"),
        ('[model]\ndtype = "float64"', r"dtype is 'float64': choose from"),
        (
            '[data]\nfields = ["t"]\ntemplate = "prompt"',
            r"fields is \['t'\], plain texts, but template is 'prompt'",
        ),
        ('[data]\nfields = ["q", ""]', r"fields is \['q', ''\] but must be a list of strings that are not empty"),
        (
            '[run]\nloggers = ["tensorbord"]',
            r"\[run\] loggers is \['tensorbord'\]: choose from tensorboard, wandb.*mean",
        ),
        ("[topology]\ncontext_parallel = 2.5", r"context_parallel is 2.5: choose from auto, or a whole number"),
        ("[debug]", r"\[debug\] was removed: use \[run\]"),
        ('[debug]\nlog_dir = "logs"', r"\[debug\] log_dir was removed: use \[run\] log_dir"),
        ('[debug]\nlog_level = "info"', r"\[debug\] log_level was removed: use \[run\] log_level"),
        ('[debug]\nplan_dir = "plans"', r"\[debug\] plan_dir was removed: use \[run\] plan_dir"),
        ('[plan]\nrule = "dynapipe"', r"\[plan\] rule was removed: use \[plan\] split_policy"),
        ("[topology]\nwidth = 2", r"\[topology\] width was removed: use \[topology\] context_parallel"),
        (
            '[topology]\nvocabulary = "head"',
            r"\[topology\] vocabulary was removed: use \[topology\] vocabulary_parallel",
        ),
        ("[data]\nprefetch_steps = 1", r"\[data\] prefetch_steps was removed: leave it out, as planners stay 2 steps"),
        ("[plan]\nmax_tokens = 4", r"\[plan\] max_tokens is 4 but must be at least pad_multiple, which is 8, or 0"),
        ('[plan]\nlayout = "padded"\npieces = 64', r"\[plan\] pieces is 64 with layout 'padded': .*or pieces off"),
        ('[plan]\nschedule = "1f1b"\nnoise = 0.1', r"\[plan\] noise is 0.1 with schedule '1f1b', whose order is given"),
        ("[plan]\nnoise = 0.95", r"\[plan\] noise is 0.95 but must be at least 0 and at most 0.9"),
        ('[plan]\nschedule = "1f1b"\nsplit_backward = true', r"\[plan\] split_backward goes with the adaptive"),
        ("[optimizer]\nlr = nan", r"\[optimizer\] lr is nan but must be a finite number"),
        (
            "[optimizer]\nlr = 1e-4",
            r"\[optimizer\] min_lr is 0\.0002 but must be at most lr.* 0\.0001: lower min_lr too",
        ),
        (
            "[topology]\npp = 99999999999999999999",
            r"\[topology\] pp is 9{20} but must be at least 1 and at most 65,536",
        ),
        ("[run]\nsteps = 99999999999999999999", r"\[run\] steps is 9{20} but must be at most 1,000,000"),
        ("[optimizer]\nbetas = [0.9, 2]", r"betas is \(0\.9, 2\.0\) but must be two numbers of 0 to below 1"),
        (
            "[plan]\nadapt_costs = true\n[optimizer]\ndeterministic = true",
            r"adapt_costs is True but what actions take is never",
        ),
        ("[job]\ntimeout_s = inf", r"\[job\] timeout_s is inf but must be a finite number"),
        ("[eval]\nevery = 5", r"\[eval\] every is 5 but there is nothing to evaluate on: give path, .* or fraction"),
        ('[eval]\nevery = 5\nfraction = 0.1\npath = "a"', r"\[eval\] path is a and fraction is 0\.1: .* leave one out"),
        ("[eval]\nfraction = 0.1\nsteps = 2", r"\[eval\] fraction is 0\.1 and steps is 2 but every is 0"),
        ("[model]\nhidden_size = 126", r"\[model\] hidden_size is 126 but must be a multiple of num_heads, which is 4"),
        ("[model]\nnum_query_groups = 3", r"\[model\] num_heads is 4 but must be a multiple of num_query_groups.* 3"),
        ("[model]\nhidden_size = 60", r"\[model\] hidden_size / num_heads is 60 / 4 = 15 but must be even with .*rope"),
    ],
)
def test_a_wrong_setting_is_named_with_file_table_and_bound(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        from_toml(tmp_path, text)
    assert str(tmp_path / "settings.toml") in str(caught.value)
    assert "\n" not in str(caught.value)


NUMBERS = [(t, one) for t, s in list_tables().items() for one in s.values() if one.kind in (int, float)]


@pytest.mark.parametrize(("table", "one"), NUMBERS, ids=lambda value: getattr(value, "name", value))
def test_every_number_is_taken_at_its_bounds_and_refused_beyond_by_table_name_and_bound(table: str, one: Any) -> None:
    """Read off the declarations: 1 beyond what is bounded by at least or at most, the bound itself where it is open."""
    open_ends = [bound for bound in (one.above, one.below) if abs(bound) < math.inf]
    for bound in (one.at_least, one.at_most):
        if one.above < bound < one.below:
            assert one.check_value(one.kind(bound)) == bound
    for value in map(one.kind, (one.at_least - 1, one.at_most + 1, *open_ends)):
        said = re.escape(f"config: [{table}] {one.name} is {short(value)} but must be ")
        with pytest.raises(ConfigError, match=rf"^{said}(at least|above|at most|below) -?[\d,]+"):
            TrainConfig.from_json({table: {one.name: value}})
    if one.kind is float:
        with pytest.raises(ConfigError, match=rf"{one.name} is nan but must be a finite number"):
            one.check_value(math.nan)


@pytest.mark.parametrize(
    "text",
    [
        '[model]\nhidden_size = 60\nposition = "learned"',
        "[optimizer]\nlr = 1e-4\nmin_lr = 1e-4\nwarmup_steps = 0\nweight_decay = 0\nclip_grad = 0",
        "[plan]\neffort = 0\nmax_tokens = 0",
    ],
)
def test_the_bounds_themselves_are_allowed(tmp_path: Path, text: str) -> None:
    assert from_toml(tmp_path, text) != TrainConfig()


@pytest.mark.parametrize(
    "text",
    ["[data]\nbatch_size = 4\ntokens_per_batch = 64", "[data]\ntokens_per_batch = 0"],
    ids=["both", "neither"],
)
def test_exactly_one_size_of_the_global_batch_is_given(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"tokens_per_batch is .* and batch_size is .*: set exactly one"):
        from_toml(tmp_path, text)
    assert from_toml(tmp_path, "[data]\nbatch_size = 4").data.tokens_per_batch == 0


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"[run\nsteps = 1", "line 1"), (b"\xff\xfe", "TOML"), (None, "No such file")],
    ids=["broken", "not text", "absent"],
)
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "settings.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        TrainConfig.read(path)
    assert str(path) in str(caught.value)


def test_flags_replace_single_settings_and_are_checked() -> None:
    config = TrainConfig().with_values(run={"steps": 3}, data={"tokens_per_batch": 0, "batch_size": 4}, plan={})
    assert (config.run.steps, config.run.seed, config.data.batch_size) == (3, 0, 4)
    assert config.plan == TrainConfig().plan
    with pytest.raises(ConfigError, match=re.escape("command line: [run] steps is 0")):
        TrainConfig().with_values(run={"steps": 0})


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [
        ([], {}),
        (["--steps", "3", "--tp", "2"], {"run": {"steps": 3}, "topology": {"tp": 2, "pp": 1, "dp": 1}}),
        (["--batch-size", "8"], {"data": {"batch_size": 8, "tokens_per_batch": 0}}),
        (["--tokens-per-batch", "99"], {"data": {"tokens_per_batch": 99}}),
        (["--layers-per-stage", "1, 3"], {"topology": {"layers_per_stage": (1, 3)}}),
        (["--layers-per-stage", "1.5,2.5"], {"topology": {"layers_per_stage": (1.5, 2.5)}}),
        (["--noise", "0.1"], {"plan": {"noise": 0.1}}),
        (["--truncate", "--strict"], {"data": {"truncate": True}, "job": {"strict": True}}),
        (["--truncate", "64"], {"data": {"truncate": True}, "model": {"max_seq_len": 64}}),
    ],
)
def test_the_flags_of_train_override_the_file(arguments: list[str], changed: dict[str, dict[str, Any]]) -> None:
    assert parse_train(arguments) == TrainConfig().with_values(**changed)


@pytest.mark.parametrize(
    ("arguments", "layers"),
    [
        (["--pp", "2"], (1.5, 2.5)),
        (["--steps", "9"], (1.5, 2.5)),
        (["--pp", "4"], ()),
        (["--placement", "v"], ()),
        (["--pp", "4", "--layers-per-stage", "2,0.5,0.5,1"], (2, 0.5, 0.5, 1)),
    ],
)
def test_other_stages_than_a_files_have_not_its_layers(
    tmp_path: Path, arguments: list[str], layers: tuple[float, ...]
) -> None:
    from_toml(tmp_path, "[topology]\npp = 2\nlayers_per_stage = [1.5, 2.5]\n")
    assert parse_train(["--config", str(tmp_path / "settings.toml"), *arguments]).topology.layers_per_stage == layers


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--truncate", "0"], "--truncate is 0 but must be at least 1"),
        (["--truncate", "9", "--max-seq-len", "8"], "--truncate is 9 and --max-seq-len 8: give one of them"),
        (["--tokens-per-batch", "9", "--batch-size", "9"], "set exactly one"),
        (["--batch-size", "0"], "set exactly one"),
        (["--cp", "1_0"], "context_parallel is '1_0': choose from auto, or a whole number"),
        (["--cp", "2.5"], "context_parallel is 2.5: choose from auto, or a whole number"),
    ],
)
def test_flags_that_cannot_be_are_refused(arguments: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_train(arguments)


def test_a_run_has_no_limit_on_planning_time() -> None:
    """Its plans are a function of settings alone."""
    with pytest.raises(SystemExit):
        parse_train(["--time-limit", "5"])


def parse_train(arguments: list[str]) -> TrainConfig:
    parser = argparse.ArgumentParser()
    requested.add_arguments(parser)
    return requested.config_from(parser.parse_args(arguments))


INTERLEAVED = {"pp": 2, "placement": "interleaved", "layers_per_stage": (1, 1, 1.5, 0.5)}


def test_a_file_beside_a_resumed_run_changes_what_it_names_alone(tmp_path: Path) -> None:
    run_dir, file = tmp_path / "run", tmp_path / "more.toml"
    run_dir.mkdir()
    begun = TrainConfig().with_values(optimizer={"lr": 7e-4, "min_lr": 7e-5}, topology={"tp": 1}, run={"steps": 9})
    (run_dir / "config.toml").write_text(toml_of(begun.to_json(), "Settings."))
    file.write_text("[optimizer]\nweight_decay = 0.5\n[run]\nsteps = 12\n")
    going_on = begun.with_values(optimizer={"weight_decay": 0.5}, run={"steps": 12, "run_dir": str(run_dir)})
    assert parse_train(["--resume", str(run_dir), "--config", str(file)]) == going_on
    by_flags = ["--resume", str(run_dir), "--weight-decay", "0.5", "--steps", "12"]
    assert parse_train(by_flags) == going_on
    assert parse_train([*by_flags, "--config", str(file), "--steps", "15"]).run.steps == 15


def test_a_run_of_an_earlier_version_is_resumed_without_the_keys_that_are_gone(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[run]\nsteps = 7\ntraced_steps = 1\n[data]\ntext_key = 't'\n")
    resumed = parse_train(["--resume", str(tmp_path), "--run-dir", str(tmp_path)])
    assert (resumed.run.steps, resumed.data.fields) == (7, ("t",))
    assert read_settings(tmp_path) == {"run": {"steps": 7}, "data": {"fields": ["t"]}}  # which pages compare
    assert describe_losses(tmp_path) == [
        "[run] traced_steps 1 was removed: leave it out, as the page draws the last 3 steps"
    ]


@pytest.mark.parametrize(
    ("saved", "today", "says"),
    [
        ({"debug": {"log_dir": "logs"}}, {"run": {"log_dir": "logs"}}, ""),
        ({"debug": {"log_level": "debug"}}, {"run": {"log_level": "debug"}}, ""),
        ({"debug": {"plan_dir": "plans"}}, {"run": {"plan_dir": "plans"}}, ""),
        ({"plan": {"rule": "dynapipe"}}, {"plan": {"split_policy": "dynapipe"}}, ""),
        ({"topology": {"vocabulary": "head"}}, {"topology": {"vocabulary_parallel": "head"}}, ""),
        ({"topology": {"width": 2}}, {"topology": {"context_parallel": 2}}, ""),
        ({"run": {"tensorboard": True, "wandb": ""}}, {"run": {"loggers": ["tensorboard"]}}, ""),
        ({"run": {"tensorboard": False, "wandb": "mine"}}, {"run": {"loggers": ["wandb"]}}, "'mine' .*WANDB_PROJECT"),
        ({"data": {"input_key": "", "target_key": "", "text_key": "t"}}, {"data": {"fields": ["t"]}}, ""),
        ({"data": {"input_key": "q", "target_key": "a"}}, {"data": {"fields": ["q", "a"]}}, ""),
        ({"data": {"input_key": "q", "target_key": "a", "text_key": "t"}}, {"data": {"fields": ["q", "a"]}}, "'t' was"),
        ({"data": {"input_key": "", "target_key": "", "text_key": "", "prefetch_steps": 2}}, {}, ""),
        ({"data": {"prefetch_steps": 4}}, {}, r"^\[data\] prefetch_steps 4 was removed: leave it out"),
        ({"run": {"traced_steps": 0}}, {}, r"traced_steps 0 was removed"),
        ({"plan": {"replica_counts": "equal"}}, {}, r"replica_counts 'equal' was removed: leave it out, as counts are"),
        ({"topology": {"stages_per_rank": 4}}, {}, r"stages_per_rank 4 was removed: .*layers_per_stage"),
        ({"checkpoint": {"save_format": "megatron"}}, {}, r"'megatron' was removed: .*convert OUTPUT DIR --to FORMAT"),
        ({"checkpoint": {"output_merged": "whole"}}, {}, r"'whole' was removed: .*convert OUTPUT DIR --merge BASE"),
        ({"checkpoint": {"background": True}}, {}, r"background True was removed: leave it out"),
        ({"checkpoint": {"save_format": "hf", "output_merged": "", "background": False}}, {}, ""),
        ({"run": {"traced_steps": 3}, "plan": {"replica_counts": "free"}, "topology": {"stages_per_rank": 0}}, {}, ""),
        (TrainConfig().to_json(), TrainConfig().to_json(), ""),
    ],
)
def test_settings_of_earlier_versions_have_todays_names_and_those_that_are_gone_are_told(
    saved: dict[str, Any], today: dict[str, Any], says: str
) -> None:
    translated, gone = translate_saved(saved)
    assert translated == today
    assert len(gone) == bool(says)
    assert all(re.search(says, line) for line in gone)


@pytest.mark.parametrize(
    ("of_run", "flags", "says"),
    [
        ({"job": {"redis_server": "/evil.sh"}}, [], "names a program: /evil.sh: add --redis-server /evil.sh"),
        ({"job": {"redis_server": "run/evil.sh"}}, [], "names a program: run/evil.sh: add --redis-server run/evil.sh"),
        ({"job": {"redis_server": "/evil.sh"}}, ["--redis-server", "/usr/bin/valkey-server"], ""),
        ({"job": {"redis_server": "/evil.sh"}}, ["--redis-server", ""], ""),
        ({"run": {"log_dir": "/home/logs"}}, [], "writes outside of it: /home/logs: add --log-dir /home/logs"),
        ({"run": {"plan_dir": "run/../plans"}}, [], "writes outside of it: run/../plans: add --plan-dir"),
        ({"run": {"plan_dir": "run/link/plans"}}, [], "writes outside of it: run/link/plans: add --plan-dir"),
        ({"run": {"plan_dir": "run/plans", "log_dir": "run"}}, [], ""),
        ({"run": {"log_dir": "logs"}}, ["--config", "more.toml"], ""),
        ({"checkpoint": {"output": "tuned"}}, ["--steps", "90"], "writes outside of it: tuned: add --output tuned"),
        ({"checkpoint": {"output": "tuned"}}, ["--output", "tuned"], ""),
        ({"deepspeed": {"config": "plain.json"}}, [], ""),
        (
            {"deepspeed": {"config": "writes.json"}},
            [],
            "writes outside of it: writes.json: add --deepspeed writes.json",
        ),
        ({"deepspeed": {"config": "writes.json"}}, ["--deepspeed", "writes.json"], ""),
    ],
)
def test_a_resumed_run_takes_no_program_and_no_place_outside_of_it_from_its_folder(
    of_run: dict[str, Any], flags: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/link").symlink_to(tmp_path)
    Path("more.toml").write_text('[run]\nlog_dir = "logs"\n')
    Path("plain.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    Path("writes.json").write_text(json.dumps({"csv_monitor": {"enabled": True, "output_path": "/home/logs"}}))
    begun = TrainConfig().with_values(**of_run)
    Path("run/config.toml").write_text(toml_of(begun.to_json(), "Settings."))
    if not says:
        parse_train(["--resume", "run", *flags])
        return
    with pytest.raises(ConfigError) as refused:
        parse_train(["--resume", "run", *flags])
    assert says in str(refused.value)
    assert len(str(refused.value)) <= 200


@pytest.mark.parametrize(
    ("of_run", "named", "expected"),
    [
        ({"data": {"batch_size": 10}}, "[data]\ntokens_per_batch = 600", {"data": {"batch_size": 0}}),
        ({"data": {"path": "a"}}, '[data]\nmixture = ["b", "c"]', {"data": {"path": ""}}),
        ({"data": {"mixture": ["b", "c"]}}, '[data]\npath = "a"', {"data": {"mixture": ()}}),
        ({"eval": {"fraction": 0.2, "every": 2}}, '[eval]\npath = "e"', {"eval": {"fraction": 0.0, "every": 2}}),
        (
            {"optimizer": {"warmup_fraction": 0.2}},
            "[optimizer]\nwarmup_steps = 5",
            {"optimizer": {"warmup_fraction": 0}},
        ),
        ({"run": {"epochs": 2.0}}, "[run]\nsteps = 5", {"run": {"epochs": 0.0, "steps": 5}}),
        (
            {"topology": INTERLEAVED},
            "[topology]\npp = 1",
            {"topology": {"placement": "", "layers_per_stage": ()}},
        ),
        (
            {"topology": INTERLEAVED},
            "[topology]\npp = 4",
            {"topology": {"placement": "interleaved", "layers_per_stage": ()}},
        ),
    ],
)
def test_what_a_file_beside_a_resumed_run_replaces_is_reset(
    of_run: dict[str, Any], named: str, expected: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    run_dir, file = tmp_path / "run", tmp_path / "more.toml"
    run_dir.mkdir()
    data = {"tokens_per_batch": 0, "batch_size": 9, **of_run.get("data", {})}
    begun = TrainConfig().with_values(**of_run | {"data": data})
    (run_dir / "config.toml").write_text(toml_of(begun.to_json(), "Settings."))
    file.write_text(named)
    config = parse_train(["--resume", str(run_dir), "--config", str(file)])
    for table, values in expected.items():
        assert {name: getattr(getattr(config, table), name) for name in values} == values


@pytest.mark.parametrize(
    "named",
    [
        "[data]\nbatch_size = 0",
        "[data]\nmixture = []",
        '[eval]\npath = ""',
        "[optimizer]\nwarmup_fraction = 0.0",
    ],
)
def test_an_alternative_that_is_named_as_not_given_replaces_nothing(tmp_path: Path, named: str) -> None:
    (tmp_path / "named.toml").write_text(named)
    begun = TrainConfig().with_values(
        data={"path": "a"}, eval={"fraction": 0.2, "every": 2}, optimizer={"warmup_steps": 7}
    )
    assert TrainConfig.read(tmp_path / "named.toml", begun) == begun
    (tmp_path / "none.toml").write_text("[optimizer]\nwarmup_steps = 0")
    rising = begun.with_values(optimizer={"warmup_steps": 0, "warmup_fraction": 0.2})
    assert TrainConfig.read(tmp_path / "none.toml", rising).optimizer.warmup_fraction == 0


QWEN = {
    **{"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    **{"num_hidden_layers": 6, "intermediate_size": 96, "vocab_size": 300, "max_position_embeddings": 512},
}


def test_a_named_model_gives_every_size_and_rows_may_be_shorter(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    text = f'[model]\narchitecture = "{tmp_path}"\nmax_seq_len = 128\ndropout = 0.1\n'
    config = from_toml(tmp_path, text)
    model, described = config.model, read_model(str(tmp_path))[0]
    assert (model.num_layers, model.hidden_size, model.norm, model.bias, model.dropout) == (
        6,
        64,
        "rmsnorm",
        False,
        0.1,
    )
    assert (model.max_seq_len, model.described) == (128, described)
    assert from_toml(tmp_path, text.replace("max_seq_len = 128\n", "")).model.max_seq_len == 512
    changed = from_toml(tmp_path, text).with_values(model={"dtype": "bfloat16"})
    assert changed.model.max_seq_len == 128  # what the file says stays, whatever else a flag changes
    assert TrainConfig.from_json(config.to_json()) == config
    assert architecture_of(config, 300) == described
    assert architecture_of(config, 301) == described  # of a tokenizer with more ids, which no sample need have


def test_a_model_named_by_a_flag_takes_the_place_of_the_files_sizes(tmp_path: Path) -> None:
    config = from_toml(tmp_path, "[model]\nnum_layers = 9").with_values(model={"architecture": "gpt2"})
    assert (config.model.num_layers, config.model.max_seq_len, config.model.position) == (12, 1024, "learned")
    with pytest.raises(ConfigError, match=r"command line: .* gpt2 has max_seq_len 1024, but max_seq_len is 4096"):
        config.with_values(model={"max_seq_len": 4096})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('architecture = "gpt2"\nnum_layers = 4', "gpt2 has num_layers 12, but num_layers is 4: leave it out"),
        ('architecture = "gpt2"\nmax_seq_len = 1032', "gpt2 has max_seq_len 1024, but max_seq_len is 1032"),
        (
            'architecture = "t5-small"\nnum_decoder_layers = 4',
            "t5-small has num_decoder_layers 6, but num_decoder_layers is 4: leave it out",
        ),
        (
            'num_decoder_layers = 4\nposition = "rope"',
            "num_decoder_layers makes a T5, which has position relative, but position is rope: leave it out",
        ),
        ('position = "relative"', "position is 'relative' and num_decoder_layers is 0: relative positions are those"),
        (
            'num_decoder_layers = 4\n[plan]\nsplit_policy = "fixed-rows"',
            "split_policy is 'fixed-rows' but it would mix the inputs of an encoder-decoder",
        ),
        (
            'architecture = "mixtral-8x7b"',
            "mixtral-8x7b has 8 experts, which Megatron trains with tp 2 only under sequence parallelism",
        ),
        ('architecture = "gemma-2-9b"\n[plan]\npieces = "auto"', r"pieces is 'auto' but .*sliding_window 4096"),
        ("num_decoder_layers = 2\n[plan]\npieces = 512", "pieces is 512 but inputs of an encoder-decoder"),
        ('architecture = "gpt5"', "model 'gpt5' is no preset: give the path of a config.json"),
        ("described = 1", r"\[model\]: unknown \['described'\]"),
    ],
)
def test_a_named_model_that_is_contradicted_or_cannot_be_trained_is_refused(
    tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        from_toml(tmp_path, f"[model]\n{text}")


def test_no_text_of_settings_holds_a_nul(tmp_path: Path) -> None:
    """Nothing that takes a path, an address or a name could take it: it would be a traceback, or a rank's end."""
    num_texts = 0
    for table, settings in list_tables().items():
        for name, one in settings.items():
            if one.kind in (str, tuple[str, ...]) and (table, name) != ("deepspeed", "config"):  # read at once
                value = json.dumps("a\0b") if one.kind is str else json.dumps(["a", "a\0b"])
                (tmp_path / "c.toml").write_text(f"[{table}]\n{name} = {value}\n")
                with pytest.raises(ConfigError, match=rf"\[{table}\] {name} is .* must not hold the character NUL"):
                    TrainConfig.read(tmp_path / "c.toml")
                num_texts += 1
    assert num_texts > 15

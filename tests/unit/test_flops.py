"""FLOPs against closed forms, against torch's own counter, and through the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynapipe_ext.batch.micro_batches import RECOMPUTES, MicroBatch, SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.launch.cli import main
from dynapipe_ext.models.flops import Positions, Work, forward_flops, step_flops, work_of
from dynapipe_ext.models.huggingface import read_config
from dynapipe_ext.tools.account.flops import LoggedRun, account, read_log
from dynapipe_ext.tools.account.report import RunFacts, RunReport, RunResult, StoreInfo

_GPT = read_config({"model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 51_200})
_SMALL: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 131, "max_position_embeddings": 64,
}  # fmt: skip


@given(st.integers(1, 64), st.integers(1, 4096))
def test_uniform_lengths_give_the_closed_form_of_narayanan_et_al(batch: int, length: int) -> None:
    """Equation 3: F = 96 B s l h^2 (1 + s / 6h + V / 16 l h), with every activation recomputed; 72 without."""
    layers, hidden, vocab = _GPT.num_layers, _GPT.hidden_size, _GPT.vocab_size
    positions = Positions.of_rows(length, rows=batch)
    whole = step_flops(_GPT, Work(positions, {"full": positions}))
    terms = batch * length * layers * hidden**2
    attention = 16 * batch * length**2 * layers * hidden  # 96 B s l h^2 x s / 6h
    head = 6 * batch * length * hidden * vocab  # 96 B s l h^2 x V / 16 l h
    assert whole.executed == 96 * terms + attention + head
    assert step_flops(_GPT, Work(positions, {"none": positions})).executed == 72 * terms + attention * 3 // 4 + head
    assert whole.padding == 0


def test_recomputation_does_attention_layers_or_all_of_a_stage_once_more() -> None:
    positions = Positions.of_rows(128, rows=4)
    none, selective, full, stage = (step_flops(_GPT, Work(positions, {kind: positions})) for kind in RECOMPUTES)
    forward = forward_flops(_GPT, positions)
    assert (none.recompute, selective.recompute) == (0, forward.attention)
    assert full.recompute == forward.layers + forward.attention
    assert stage.recompute == forward.total
    assert none.model == selective.model == full.model == 3 * forward.total


def test_a_causal_count_has_half_the_attention_of_decoders_alone() -> None:
    positions = Positions.of_rows(64, 32, rows=2)
    t5 = read_config({"model_type": "t5", "d_model": 64, "num_layers": 2, "num_heads": 4, "d_kv": 16, "d_ff": 128})
    whole, causal = (forward_flops(t5, positions, causal=flag).attention for flag in (False, True))
    assert whole - causal == 2 * 4 * 64 * 2 * 32**2 // 2
    assert forward_flops(_GPT, positions, causal=True).attention * 2 == forward_flops(_GPT, positions).attention


_lengths = st.lists(st.integers(1, 300), min_size=1, max_size=9)


@given(_lengths, st.sampled_from(["padded", "packed"]), st.sampled_from(["document", "row"]), st.integers(1, 16))
def test_work_counts_what_every_layout_executes(
    lengths: list[int], layout: Any, attention: Any, pad_multiple: int
) -> None:
    samples = tuple(SampleLength(i, n) for i, n in enumerate(lengths))
    m = MicroBatch(samples, layout, attention=attention, pad_multiple=pad_multiple)
    work = work_of([m])
    assert work.real.encoder == m.real_tokens
    assert work.real.encoder_squares == sum(n**2 for n in lengths)
    assert work.all_executed.total == m.padded_tokens
    if layout == "padded" or attention == "row":
        assert work.all_executed.encoder_squares == m.rows * m.encoder_len**2
    assert Work.from_numbers(work.numbers()) == work
    flops = step_flops(_GPT, work)
    assert flops.padding >= 0
    assert (flops.padding == 0) == (m.padded_tokens == m.real_tokens and work.real == work.all_executed)


def test_work_adds_up_over_micro_batches() -> None:
    one = MicroBatch((SampleLength(0, 5, 3),), recompute="full")
    two = MicroBatch((SampleLength(1, 7, 2), SampleLength(2, 4, 6)))
    work = work_of([one, two])
    assert work.real == Positions(16, 11, 25 + 49 + 16, 9 + 4 + 36, 15 + 14 + 24)
    assert work.executed == {"full": Positions(5, 3, 25, 9, 15), "none": Positions(14, 12, 98, 72, 84)}


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "experts_implementation": "eager"}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SMALL,
    "qwen3": _SMALL | {"head_dim": 32},
    "qwen2_moe": _SMALL | _EXPERTS | {"shared_expert_intermediate_size": 80},
    "qwen3_moe": _SMALL | _EXPERTS | {"head_dim": 32},
    "phi3": _SMALL | {"pad_token_id": None},
    "olmo2": _SMALL,
    "gemma2": _SMALL | {"head_dim": 32},
    "gemma3_text": _SMALL | {"head_dim": 32},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 131},
    "t5": {"d_model": 64, "d_kv": 8, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 131},
}


@pytest.mark.parametrize("family", _FAMILIES)
def test_a_built_model_does_as_many(family: str) -> None:
    """torch counts every matrix product of a forward and a backward of the model that transformers builds."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    config = transformers.AutoConfig.for_model(family, **_FAMILIES[family], attn_implementation="eager")
    auto = transformers.AutoModelForSeq2SeqLM if family == "t5" else transformers.AutoModelForCausalLM
    model = auto.from_config(config)
    rows, length = 3, 24
    inputs = {"input_ids": torch.zeros((rows, length), dtype=torch.long), "use_cache": False}
    positions = Positions.of_rows(length, rows=rows)
    if family == "t5":
        inputs["decoder_input_ids"] = torch.zeros((rows, 7), dtype=torch.long)
        positions = Positions.of_rows(length, 7, rows)
    with FlopCounterMode(display=False) as counter:
        logits = model(**inputs).logits
        forward = counter.get_total_flops()
        logits.sum().backward()
    architecture = read_config(config.to_dict())
    assert forward == forward_flops(architecture, positions).total
    assert counter.get_total_flops() - forward == 2 * forward_flops(architecture, positions).total


def test_experts_count_as_often_as_a_token_takes_one() -> None:
    mixtral = read_config({"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2} | _SMALL)
    dense = read_config({"model_type": "mistral"} | _SMALL)
    positions = Positions.of_rows(10)
    more = forward_flops(mixtral, positions).layers - forward_flops(dense, positions).layers
    assert more == 2 * 2 * 10 * (3 * 64 * 96 + 64 * 8)


def test_an_account_tells_mfu_and_hfu_apart() -> None:
    real = Positions.of_rows(100, rows=8)
    work = Work(real, {"full": real + Positions.of_rows(28, rows=8)})
    one = account("run", _GPT, work, seconds=2.0, gpus=4, peak_flops_per_s=1e12)
    assert one.mfu == pytest.approx(one.flops.model / 8e12)
    assert one.hfu == pytest.approx((one.flops.model + one.flops.padding + one.flops.recompute) / 8e12)
    assert replace(one, peak_flops_per_s=0.0).mfu is None
    with pytest.raises(ConfigError, match="above 0"):
        account("run", _GPT, work, seconds=0.0, gpus=4)


def _config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama"} | _SMALL))
    return str(path)


def test_a_step_is_accounted_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "lengths.npy", np.array([5, 17, 60]))
    arguments = ["--model", _config(tmp_path), "--seconds-per-step", "0.5", "--gpus", "2", "--json"]
    assert main(["flops", *arguments, "--lengths", str(tmp_path / "lengths.npy"), "--padded-tokens", "180"]) == 0
    [found] = json.loads(capsys.readouterr().out)["accounts"]
    architecture = read_config({"model_type": "llama"} | _SMALL)
    real = Positions.of_samples([(5, 0), (17, 0), (60, 0)])
    assert found["model_flops"] == 3 * forward_flops(architecture, real).total
    assert found["model_tflops_per_gpu"] == pytest.approx(found["model_flops"] / 0.5 / 2 / 1e12)
    assert (found["real_tokens"], found["padded_tokens"], found["mfu"]) == (82, 180, None)
    assert found["padding_flops"] > 0


def test_a_log_of_megatron_tells_seconds_batch_and_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["using world size: 16, data-parallel size: 4", "  seq_length ...................... 64"]
    lines += [
        f" iteration {i:8d}/ 100 | elapsed time per iteration (ms): {ms} | lr: 1e-4 | global batch size: 32 |"
        for i, ms in enumerate((9000.0, 1000.0, 1010.0, 990.0, 1000.0))
    ]
    log = tmp_path / "train.log"
    log.write_text("\n".join(lines))
    logged = read_log(log)
    assert logged == LoggedRun(1.0, 32, 16, 64, 0, "none")
    assert main(["flops", "--log", str(log), "--model", _config(tmp_path), "--peak-tflops", "0.001", "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["accounts"]
    assert (found["gpus"], found["seconds"], found["real_tokens"]) == (16, 1.0, 32 * 64)
    assert found["mfu"] == pytest.approx(found["model_tflops_per_gpu"] / 0.001)
    log.write_text("nothing of that kind")
    with pytest.raises(DataError, match="elapsed time per iteration"):
        read_log(log)


def test_the_last_start_and_the_last_batch_size_of_a_log_count(tmp_path: Path) -> None:
    """Behind prefixes of launchers, after a restart on more devices and a ramp-up of the batch."""
    prefix = "[2026-11-21 10:00:00] [node-3] 5: "

    def step(ms: str, batch: int) -> str:
        return f" iteration 7/ 99 | elapsed time per iteration (ms): {ms} | global batch size: {batch:5d} |"

    lines = ["using world size: 64, data-parallel size: 8", *[step("9000.0", 32)] * 50]
    lines += ["using world size: 128, data-parallel size: 16", "  encoder_seq_length .............. 512"]
    lines += ["  decoder_seq_length .............. 114", "  recompute_granularity ........... full"]
    lines += [*[step("1000.0", 32)] * 20, "validation loss at iteration 7 | lm loss value: 2.0", step("8,000.5", 256)]
    lines += [step("8.2e+03", 256), step("8100", 256)]
    log = tmp_path / "train.log"
    log.write_text("\n".join(prefix + line for line in lines))
    assert read_log(log) == LoggedRun(8.1, 256, 128, 512, 114, "full")
    log.write_text(step("1.2.3", 32))
    with pytest.raises(DataError, match="line 1: the time of an iteration is no number"):
        read_log(log)


def test_a_window_bounds_what_a_position_attends_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "mistral", "sliding_window": 16} | _SMALL))
    step = ["--seconds-per-step", "1", "--gpus", "1", "--seq-len", "64", "--batch-size", "3", "--json"]
    assert main(["flops", "--model", str(config), *step]) == 0
    [found] = json.loads(capsys.readouterr().out)["accounts"]
    assert found["attention_flops"] == 3 * 2 * 4 * 64 * (3 * 64 * 16)
    assert found["head_flops"] == 3 * 2 * 64 * 131 * 3 * 64


def test_padded_tokens_attend_over_rows_of_the_longest_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "lengths.npy", np.array([10, 40]))
    step = ["--model", _config(tmp_path), "--seconds-per-step", "1", "--gpus", "1", "--json"]
    assert main(["flops", *step, "--lengths", str(tmp_path / "lengths.npy"), "--padded-tokens", "80"]) == 0
    [found] = json.loads(capsys.readouterr().out)["accounts"]
    architecture = read_config({"model_type": "llama"} | _SMALL)
    assert found["executed_flops"] == 3 * forward_flops(architecture, Positions.of_rows(40, rows=2)).total


def test_the_examples_of_the_help_count(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "llama-2-7b", "--seq-len", "4096", "--batch-size", "512", "--seconds-per-step", "21.3"]
    assert main(["flops", *words, "--gpus", "64", "--device", "h100"]) == 0
    shown = capsys.readouterr().out
    assert "MFU" in shown
    assert "│" not in shown  # plain columns in a pipe


def test_a_step_has_flops_without_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    step = ["--model", "llama-2-7b", "--seq-len", "4096", "--batch-size", "512"]
    assert main(["flops", *step]) == 0
    shown = capsys.readouterr().out
    assert "model FLOPs a step" in shown
    assert "TFLOP/s" not in shown
    counts = []
    for timed in ([], ["--seconds-per-step", "21.3", "--gpus", "64"]):
        assert main(["flops", *step, *timed, "--json"]) == 0
        counts.append(json.loads(capsys.readouterr().out)["accounts"][0])
    assert counts[0]["model_flops"] == counts[1]["model_flops"]
    assert counts[0]["model_tflops_per_gpu"] is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give a run's report, or --model"),
        (["--model", "MODEL"], "--lengths FILE, or as --seq-len"),
        (["--model", "MODEL", "--seconds-per-step", "1"], "--gpus must be given"),
        (["--model", "MODEL", "--gpus", "1"], "give --seconds-per-step too"),
        (["--model", "MODEL", "--device", "h100"], "peak is for MFU and HFU"),
        (["--model", "MODEL", "--seconds-per-step", "1", "--gpus", "1"], "--lengths FILE, or as --seq-len"),
        (["--model", "MODEL", "--seconds-per-step", "1", "--gpus", "1", "--seq-len", "8"], "--batch-size 0"),
        (
            ["--model", "MODEL", "--seconds-per-step", "-1", "--gpus", "1", "--seq-len", "8", "--batch-size", "1"],
            "--seconds-per-step is -1.0 but must lie in 1e-09 to",
        ),
        (
            ["--model", "MODEL", "--seconds-per-step", "1", "--gpus", "1", "--seq-len", "8", "--batch-size", "1",
             "--padded-tokens", "7"],
            "--padded-tokens is 7 for 8 real tokens",
        ),
        (
            ["--model", "MODEL", "--seconds-per-step", "1", "--gpus", "1", "--seq-len", "8", "--batch-size", "1",
             "--decoder-len", "7"],
            "--decoder-len is 7",
        ),
        (["runs/x", "--gpus", "3"], "a report says what was run"),
        (["runs/absent"], "runs/absent"),
        (["--model", "no-such-file.json", "--seconds-per-step", "1", "--gpus", "1"], "no-such-file.json"),
        (["--peak-tflops", "0"], "--peak-tflops is 0.0"),
        (["--peak-tflops", "1e99"], "--peak-tflops is 1e+99"),
        (["--model", "MODEL", "--precision", "fp16"], "--precision fp16 is of a device's published peak"),
        (["--model", "MODEL", "--seq-len", "9" * 20, "--batch-size", "1"], "--seq-len is 9999"),
        (["runs/x", "--recompute", "full"], "a report says what was run"),
        (["--model", "MODEL", "--seconds-per-step", "1", "--gpus", "1", "--lengths", "PAIRS"], "one length each"),
        (["--model", "MODEL", "--seconds-per-step", "1", "--gpus", "1", "--lengths", "NONE"], "has no samples"),
        (
            ["--model", "MODEL", "--seconds-per-step", "1", "--gpus", "1", "--lengths", "PAIRS", "--batch-size", "2"],
            "--lengths has all samples",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_counted_is_refused_in_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"MODEL": _config(tmp_path), "PAIRS": str(tmp_path / "pairs.npy"), "NONE": str(tmp_path / "none.npy")}
    np.save(files["PAIRS"], np.array([[5, 3], [6, 2]]))
    np.save(files["NONE"], np.zeros(0, np.int64))
    assert main(["flops", *(files.get(word, word) for word in arguments)]) == 2
    assert said in capsys.readouterr().err


def test_a_report_is_accounted_with_what_it_is_compared_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 96}
    model: dict[str, Any] = sizes | {"gated_mlp": True, "vocab_size": 131, "max_seq_len": 64, "tied_embeddings": True}
    model["position"] = "rope"
    work = work_of([MicroBatch((SampleLength(0, 5), SampleLength(1, 9)), recompute="full")])
    one = RunResult(
        name="ours", layout="padded", schedule="adaptive", losses=(1.0, 0.5), real_tokens_per_step=(7, 7),
        padded_tokens=18, step_s=(0.5, 1.5), cpu_s=1.0, num_micro_batches=((1,), (1,)), measured_makespan_s=(0.4, 0.4),
        work=work,
    )  # fmt: skip
    facts = RunFacts(
        topology=Topology(tp=1, pp=2, dp=2), device="cpu", num_cores=2, seed=0, loss_norm="tokens", date="2026-11-21",
        oversubscribed=False, store=StoreInfo("valkey", "9"), model=model,
    )  # fmt: skip
    report = RunReport(facts=facts, result=one, compare=(replace(one, name="theirs", step_s=(1.0, 3.0)),))
    report.write(tmp_path / "report.json")
    assert main(["flops", str(tmp_path), "--json", "--peak-tflops", "0.01"]) == 0
    ours, theirs = json.loads(capsys.readouterr().out)["accounts"]
    flops = step_flops(read_config({"model_type": "llama"} | _SMALL), work)
    assert (ours["model_flops"], ours["recompute_flops"]) == (flops.model, flops.recompute)
    assert (ours["gpus"], ours["steps"], ours["seconds"]) == (4, 2, 2.0)
    assert ours["mfu"] == pytest.approx(2 * theirs["mfu"])
    replace(report, result=replace(one, accounted_steps=(1,))).write(tmp_path / "report.json")
    assert main(["flops", str(tmp_path), "--json"]) == 0
    cut = json.loads(capsys.readouterr().out)["accounts"][0]  # FLOPs are of one of two steps, and so are the seconds
    assert (cut["model_flops"], cut["steps"], cut["seconds"]) == (flops.model, 1, 1.5)
    assert main(["flops", str(tmp_path)]) == 0
    assert "real tokens a second" in capsys.readouterr().out

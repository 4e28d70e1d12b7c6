"""FLOPs of a run, and how well it used its devices: model FLOPs, MFU and HFU, with padding and recomputation."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from dynapipe_ext.batch.micro_batches import RECOMPUTES, Recompute
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.flops import StepFlops, Work, step_flops
from dynapipe_ext.tools.account.report import RunReport
from dynapipe_ext.tools.console import percent

_SIZES = (
    "num_layers", "hidden_size", "num_heads", "num_query_groups", "ffn_hidden_size", "vocab_size", "max_seq_len",
    "tied_embeddings", "gated_mlp", "position",
)  # fmt: skip
_NUMBER = r"([0-9][0-9,]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)(?![0-9.])"
_ITERATION = re.compile(rf"elapsed time per iteration \(ms\):\s*{_NUMBER}")
_BATCH = re.compile(r"global batch size:\s*([0-9]+)")
_WORLD = re.compile(r"using world size:\s*([0-9]+)")
_ARGUMENT = re.compile(r"\b(seq_length|encoder_seq_length|decoder_seq_length|recompute_granularity) \.{2,} (\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """FLOPs of `steps` steps that took `seconds` on `gpus` devices. `seconds` None: only FLOPs are counted. A peak of 0
    means unknown.
    """

    name: str
    flops: StepFlops
    seconds: float | None
    gpus: int
    steps: int
    real_tokens: int
    padded_tokens: int
    peak_flops_per_s: float = 0.0

    @property
    def model_tflops_per_gpu(self) -> float | None:
        """Achieved rate, by the FLOPs that the model needs for its real tokens."""
        return self._tflops_per_gpu(self.flops.model)

    @property
    def executed_tflops_per_gpu(self) -> float | None:
        """Achieved rate, padding and recomputation included."""
        return self._tflops_per_gpu(self.flops.executed)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over the peak of the devices (Chowdhery et al. 2022, appendix B)."""
        return self._utilisation(self.model_tflops_per_gpu)

    @property
    def hfu(self) -> float | None:
        """Executed FLOPs over the peak of the devices."""
        return self._utilisation(self.executed_tflops_per_gpu)

    def _tflops_per_gpu(self, flops: int) -> float | None:
        return None if self.seconds is None else flops / self.seconds / self.gpus / 1e12

    def _utilisation(self, tflops_per_gpu: float | None) -> float | None:
        if tflops_per_gpu is None or not self.peak_flops_per_s:
            return None
        return tflops_per_gpu * 1e12 / self.peak_flops_per_s

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "steps": self.steps,
            "seconds": self.seconds,
            "gpus": self.gpus,
            "model_flops": self.flops.model,
            "attention_flops": self.flops.attention,
            "head_flops": self.flops.head,
            "padding_flops": self.flops.padding,
            "recompute_flops": self.flops.recompute,
            "executed_flops": self.flops.executed,
            "real_tokens": self.real_tokens,
            "padded_tokens": self.padded_tokens,
            "model_tflops_per_gpu": self.model_tflops_per_gpu,
            "executed_tflops_per_gpu": self.executed_tflops_per_gpu,
            "peak_tflops": self.peak_flops_per_s / 1e12 or None,
            "mfu": self.mfu,
            "hfu": self.hfu,
        }


def account(
    name: str,
    architecture: Architecture,
    work: Work,
    *,
    seconds: float | None,
    gpus: int,
    steps: int = 1,
    peak_flops_per_s: float = 0.0,
    causal: bool = False,
    trained_share: float = 1.0,
) -> Account:
    """The account of this work; `trained_share` of the weights has gradients. Errors: ConfigError for an impossible
    time or number of devices, DataError for impossible work."""
    if not 0 < work.real.total <= work.all_executed.total or min(work.numbers()) < 0:
        raise DataError(
            f"{name}: {work.real.total} real of {work.all_executed.total} executed positions are impossible: a step has"
            " real positions, and executes all of them"
        )
    flops = step_flops(architecture, work, causal=causal, trained_share=trained_share)
    counted = flops_account(name, flops, work.real.total, seconds=seconds, gpus=gpus, peak_flops_per_s=peak_flops_per_s)
    return replace(counted, steps=steps, padded_tokens=work.all_executed.total)


def flops_account(
    name: str, flops: StepFlops, tokens: int, *, seconds: float | None, gpus: int, peak_flops_per_s: float
) -> Account:
    """The account of one step of so many real tokens, without padding. Errors: ConfigError for an impossible time or
    number of devices."""
    if seconds is not None and not 0 < seconds < float("inf"):
        raise ConfigError(f"{name}: took {seconds} s, but FLOPs a second need a time above 0")
    if gpus < 1:
        raise ConfigError(f"{name}: gpus is {gpus} but must be at least 1")
    return Account(
        name=name,
        flops=flops,
        seconds=seconds,
        gpus=gpus,
        steps=1,
        real_tokens=tokens,
        padded_tokens=tokens,
        peak_flops_per_s=peak_flops_per_s,
    )


def accounts_of_report(path: Path, *, peak_flops_per_s: float = 0.0, causal: bool = False) -> list[Account]:
    """Accounts of a run and of each run that it was compared with. Errors: DataError, ConfigError."""
    report = RunReport.read(path)
    architecture = architecture_of_run(report.facts.model, str(path))
    accounts = []
    for result in (report.result, *(report.compare or ())):
        accounts.append(
            account(
                result.name,
                architecture,
                result.work,
                seconds=sum(result.accounted(result.step_s)),
                gpus=report.facts.topology.world_size,
                steps=len(result.accounted(result.step_s)),
                peak_flops_per_s=peak_flops_per_s,
                causal=causal,
                trained_share=float(report.facts.model.get("trained_share", 1.0)),
            )
        )
    return accounts


def architecture_of_run(model: Mapping[str, Any], where: str) -> Architecture:
    """The model in the settings that a report has under "model". Errors: DataError."""
    try:
        if described := model.get("described"):
            return Architecture.from_json(described)
        return Architecture.gpt(**{name: model[name] for name in _SIZES})
    except (KeyError, TypeError, ConfigError) as error:
        raise DataError(f"{where}: its model cannot be read ({error!r}): it was written by another version") from error


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """Figures of the last start in a log of Megatron-LM; 0 for unknown ones. `seconds_per_step` is the median over the
    iterations with the last batch size.
    """

    seconds_per_step: float
    batch_size: int
    gpus: int
    seq_len: int
    decoder_len: int
    recompute: Recompute


def read_log(path: Path) -> LoggedRun:
    """The run in a log whose lines may have any prefix. Errors: DataError where it has no readable iteration."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    arguments: dict[str, str] = {}
    gpus, by_batch = 0, dict[int, list[float]]()
    batch = 0
    for number, line in enumerate(lines, 1):
        if world := _WORLD.search(line):
            gpus, by_batch = int(world[1]), {}
        if argument := _ARGUMENT.search(line):
            arguments[argument[1]] = argument[2]
        if "elapsed time per iteration (ms):" in line:
            if not (took := _ITERATION.search(line)):
                raise DataError(f"{path}: line {number}: the time of an iteration is no number: correct it")
            batch = int(size[1]) if (size := _BATCH.search(line)) else 0
            by_batch.setdefault(batch, []).append(float(took[1].replace(",", "")))
    if not by_batch:
        raise DataError(f'{path}: has no "elapsed time per iteration (ms): ..." of Megatron-LM: give its training log')

    def length(*names: str) -> int:
        return next((int(arguments[n]) for n in names if arguments.get(n, "").isdigit()), 0)

    granularity = arguments.get("recompute_granularity", "None")
    return LoggedRun(
        seconds_per_step=statistics.median(by_batch[batch]) / 1e3,
        batch_size=batch,
        gpus=gpus,
        seq_len=length("encoder_seq_length", "seq_length"),
        decoder_len=length("decoder_seq_length"),
        recompute=next((kind for kind in RECOMPUTES if kind == granularity), "none"),
    )


def flops_table(accounts: Sequence[Account]) -> Table:
    """A table with a column for each account: model FLOPs, then what is executed beyond them."""
    table = Table(title="FLOPs")
    table.add_column("")
    for entry in accounts:
        table.add_column(entry.name, justify="right")

    def row(label: str, values: Sequence[str]) -> None:
        table.add_row(label, *values)

    row("model FLOPs a step", [_flops(a.flops.model / a.steps) for a in accounts])
    row("of which attention", [_share(a.flops.attention, a.flops.model) for a in accounts])
    row("of which LM head", [_share(a.flops.head, a.flops.model) for a in accounts])
    row("padding adds", [_share(a.flops.padding, a.flops.model) for a in accounts])
    row("recomputation adds", [_share(a.flops.recompute, a.flops.model) for a in accounts])
    row("real ÷ padded tokens", [f"{a.real_tokens / max(1, a.padded_tokens):.3f}" for a in accounts])
    if all(a.seconds is None for a in accounts):
        return table
    row("seconds a step", [_number(a.seconds and a.seconds / a.steps) for a in accounts])
    row("real tokens a second", [f"{a.real_tokens / a.seconds:,.0f}" if a.seconds else "-" for a in accounts])
    row("model TFLOP/s a device", [_number(a.model_tflops_per_gpu) for a in accounts])
    row("executed TFLOP/s a device", [_number(a.executed_tflops_per_gpu) for a in accounts])
    if any(a.peak_flops_per_s for a in accounts):
        row("MFU", [_percent(a.mfu) for a in accounts])
        row("HFU", [_percent(a.hfu) for a in accounts])
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _flops(value: float) -> str:
    """
    >>> _flops(2.5e15)
    '2.5 PFLOP'
    """
    for factor, unit in ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP")):
        if value >= factor:
            return f"{value / factor:.4g} {unit}"
    return f"{value / 1e6:.4g} MFLOP"


def _share(part: int, whole: int) -> str:
    return percent(part / whole if whole else None)


def _percent(value: float | None) -> str:
    return percent(value)

"""A conversion that is killed, interrupted or out of room leaves nothing that looks whole, and goes on."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from dynapipe_ext.errors import DataError
from dynapipe_ext.tools.checkpoint import converter, journal
from dynapipe_ext.tools.checkpoint.formats import WriterOptions
from dynapipe_ext.tools.checkpoint.huggingface import folder as huggingface
from dynapipe_ext.tools.checkpoint.recognition import recognise
from tests.support.checkpoints import differences, tensors_in, unequal
from tests.support.conversion_command import SHARD_BYTES, run, to_hf
from tests.support.stopped_child import at_event, in_child, kill_self


@pytest.mark.parametrize(
    ("to", "first", "stride"),
    [("hf", 1, 1), ("megatron", 5, 11), ("megatron-legacy", 5, 11), ("deepspeed", 40, 79)],
    ids=["hf", "megatron", "megatron-legacy", "deepspeed"],
)
def test_a_kill_at_any_moment_leaves_nothing_that_looks_whole_and_loses_nothing(
    to: str, first: int, stride: int, origin: Path, tmp_path: Path
) -> None:
    own = {"shard_bytes": SHARD_BYTES} if to == "hf" else {}
    options = WriterOptions(tp=2, pp=2) if to.startswith("megatron") else WriterOptions()
    kills = kept_most = 0
    for number in range(first, 5000, stride):
        target = tmp_path / f"{number}"
        partial = target.with_name(f"{number}.partial")

        def killed(number: int = number, target: Path = target) -> int:
            at_event(number, kill_self)
            converter.convert(converter.prepare_conversion(origin, target, to, options, **own))
            return 0

        status = in_child(killed, tmp_path / "errors")
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, (tmp_path / "errors").read_text()
            break
        kills += 1
        assert os.WTERMSIG(status) == signal.SIGKILL
        if target.exists():  # killed after the last step
            assert not partial.exists()
        else:
            if to == "hf" and partial.exists() and not (partial / "config.json").exists():
                with pytest.raises(DataError, match="holds no checkpoint"):
                    recognise(partial)
            outcome = converter.convert(converter.prepare_conversion(origin, target, to, options, **own))
            kept_most = max(kept_most, outcome.num_resumed)
            assert not partial.exists()
        assert unequal(huggingface.open_checkpoint(origin), recognise(target)[0].open(target)) == []
        shutil.rmtree(target)
    assert kills >= 3
    assert kept_most >= 2
    assert unequal(huggingface.open_checkpoint(origin), recognise(target)[0].open(target)) == []


def test_pieces_that_were_whole_are_not_written_again(origin: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"

    def stopped() -> int:
        shards = 0
        write = huggingface.write_safetensors

        def counted(*args: Any) -> Any:
            nonlocal shards
            shards += 1
            if shards == 3:
                kill_self()
            return write(*args)

        huggingface.write_safetensors = counted  # type: ignore[assignment]
        return to_hf(origin, target)

    assert os.WIFSIGNALED(in_child(stopped, tmp_path / "errors"))
    shards = sorted((tmp_path / "target.partial").glob("model-*"))
    assert len(shards) == 2
    before = [shard.stat().st_ino for shard in shards]
    assert to_hf(origin, target) == 0
    assert [(target / shard.name).stat().st_ino for shard in shards] == before


def test_ctrl_c_ends_with_130_and_one_line_and_the_same_command_goes_on(
    origin: Path, wanted: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    def interrupted() -> int:
        at_event(8, lambda: os.kill(os.getpid(), signal.SIGINT))
        return to_hf(origin, tmp_path / "target")

    status = in_child(interrupted, tmp_path / "errors")
    assert os.WEXITSTATUS(status) == 130
    *_, said = (tmp_path / "errors").read_text().splitlines()
    assert said.startswith("dynapipe: interrupted: run the same command again")
    assert "Traceback" not in (tmp_path / "errors").read_text()
    assert not (tmp_path / "target").exists()
    assert to_hf(origin, tmp_path / "target") == 0
    assert differences(wanted, tensors_in(tmp_path / "target")) == []


def unfinished(origin: Path, target: Path) -> Path:
    """DST.partial with two shards, the second one's line in the journal cut."""

    def stopped() -> int:
        at_event(12, kill_self)
        return to_hf(origin, target)

    assert os.WIFSIGNALED(in_child(stopped, target.with_name("errors")))
    return target.with_name(f"{target.name}.partial")


def test_another_source_or_other_options_do_not_go_on(
    origin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(origin, tmp_path / "copy")
    unfinished(copy, tmp_path / "target")
    assert to_hf(origin, tmp_path / "target") == 2
    assert "the source was" in capsys.readouterr().err
    assert run(copy, tmp_path / "target", "--to", "hf", "--max-shard-gb", "1") == 2
    assert "remove the folder to begin anew" in capsys.readouterr().err
    os.utime(copy / "config.json", (1, 1))
    assert to_hf(copy, tmp_path / "target") == 2
    assert "the source's files changed since" in capsys.readouterr().err
    assert not (tmp_path / "target").exists()


def test_a_finished_piece_that_was_damaged_is_written_again(
    origin: Path, wanted: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    partial = unfinished(origin, tmp_path / "target")
    shard = min(partial.glob("model-*"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    (partial / "stray.safetensors").write_bytes(b"left by something")
    assert to_hf(origin, tmp_path / "target") == 0
    assert differences(wanted, tensors_in(tmp_path / "target")) == []
    assert not (tmp_path / "target/stray.safetensors").exists()


def test_an_unfinished_conversion_is_no_source(
    origin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conversion = converter.prepare_conversion(
        origin, tmp_path / "target", "hf", WriterOptions(), shard_bytes=SHARD_BYTES
    )
    with journal.ConversionJournal(conversion.partial, conversion.identity):
        shutil.copytree(origin, conversion.partial, dirs_exist_ok=True)
        assert to_hf(conversion.partial, tmp_path / "other") == 2
    assert "is an unfinished conversion" in capsys.readouterr().err


def test_two_conversions_do_not_write_one_folder(
    origin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conversion = converter.prepare_conversion(
        origin, tmp_path / "target", "hf", WriterOptions(), shard_bytes=SHARD_BYTES
    )
    with journal.ConversionJournal(conversion.partial, conversion.identity):
        assert to_hf(origin, tmp_path / "target") == 2
    assert "is being written by another conversion" in capsys.readouterr().err
    assert to_hf(origin, tmp_path / "target") == 0


def test_a_broken_journal_and_a_strange_partial_folder_are_refused(
    origin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    partial = unfinished(origin, tmp_path / "target")
    (partial / journal.NAME).write_bytes(b"[1\n{}\n")
    assert to_hf(origin, tmp_path / "target") == 2
    assert "is broken" in capsys.readouterr().err
    (partial / journal.NAME).unlink()
    assert to_hf(origin, tmp_path / "target") == 2
    assert "is no unfinished conversion" in capsys.readouterr().err


def test_a_full_disk_is_said_and_the_same_command_goes_on(
    origin: Path, wanted: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    def cramped() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        return to_hf(origin, tmp_path / "target")

    assert os.WEXITSTATUS(in_child(cramped, tmp_path / "errors")) == 2
    said = (tmp_path / "errors").read_text().splitlines()[-1]
    assert "the disk or the quota is full" in said
    assert "it goes on with" in said
    assert not (tmp_path / "target").exists()
    assert to_hf(origin, tmp_path / "target") == 0
    assert differences(wanted, tensors_in(tmp_path / "target")) == []

"""`dynapipe check-plan` ends soon and says little, however large what it is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynapipe_ext.costs.interchange import cost_model_to_json
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.launch import cli
from dynapipe_ext.tools.check import check_plan
from dynapipe_ext.tools.check.plan_file import ShapeFile


def test_a_long_text_in_place_of_an_action_is_not_echoed_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lengths.txt").write_text("40\n300\n17\n")
    (tmp_path / "costs.json").write_text(json.dumps(cost_model_to_json(TokenCosts(2, transfer_bytes_per_token=16))))
    costs = ["--costs", str(tmp_path / "costs.json"), "--memory-limit-gb", "1"]
    target = tmp_path / "plan.json"
    assert (
        cli.main(
            ["plan", "--lengths", str(tmp_path / "lengths.txt"), *costs, "--layout", "padded", "--json", str(target)]
        )
        == 0
    )
    raw = json.loads(target.read_text())
    raw["replicas"][0]["schedule"]["stages"][0][0] = "1" * 5000
    target.write_text(json.dumps(raw))
    capsys.readouterr()
    arguments = ["--lengths", str(tmp_path / "lengths.txt"), *costs, "--layout", "padded"]
    assert cli.main(["plan", *arguments, "--json", str(target)]) == 0
    raw = json.loads(target.read_text())
    raw["replicas"][0]["schedule"]["stages"][0][0] = "1" * 5000
    target.write_text(json.dumps(raw))
    capsys.readouterr()
    assert cli.main(["check-plan", str(target), *costs, "--json"]) == 1
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert "rank 0: '" + "1" * 36 + "... is no action" in faults[0]
    for command in (["plan", "--show"], ["show-schedule"]):
        assert cli.main([*command, str(target)]) == 2
        text = capsys.readouterr().err
        assert "action '" + "1" * 36 + "... is not of the form" in text
        assert len(text) < 300


def test_the_row_of_long_packed_documents_is_checked_at_once() -> None:
    """By the divisors of both lengths: there are 2^31 numbers that a row could be rounded up to."""
    row = {"samples": (0,), "layout": "packed", "rows": 1, "recompute": "none"}
    need = {0: (2**31 - 5, 2**30 - 5)}
    packed = check_plan._packed(ShapeFile(**row, encoder_len=2**31, decoder_len=2**30), need)
    assert packed is not None
    assert (packed.encoder_len, packed.decoder_len, packed.pad_multiple) == (2**31, 2**30, 8)
    assert check_plan._packed(ShapeFile(**row, encoder_len=2**31, decoder_len=2**30 + 1), need) is None


@pytest.mark.parametrize("number", [1, 2, 12, 36, 97, 1024])
def test_divisors_are_all_there_in_order(number: int) -> None:
    assert check_plan._divisors(number) == [n for n in range(1, number + 1) if number % n == 0]

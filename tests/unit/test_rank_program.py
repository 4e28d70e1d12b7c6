"""What a failing rank says under torchrun: one line on standard error, and the cause in torchrun's own error file."""

import json
from pathlib import Path
from typing import NoReturn

import pytest

from dynapipe_ext.errors import DataError
from dynapipe_ext.launch import train


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (MemoryError("no room"), 1, "rank 3: MemoryError: no room; on rank 3, step 7, 1F0: micro-batch 0"),
        (DataError("sample 5\nis damaged"), 2, "rank 3: sample 5 is damaged; on rank 3, step 7, 1F0: micro-batch 0"),
    ],
)
def test_a_failing_rank_says_its_cause_with_its_notes_in_one_line(
    error: Exception,
    status: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    error.add_note("on rank 3, step 7, 1F0: micro-batch 0")

    def fails(*_: object) -> NoReturn:
        raise error

    place = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error")}
    for name, value in (place | address).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(train, "_main", fails)
    assert train.main(["--config", "job.toml"]) == status
    assert capsys.readouterr().err == f"dynapipe: error: {says}\n"
    told = json.loads((tmp_path / "error").read_text())["message"]
    assert told["message"].endswith(says)
    assert ("in fails" in told["extraInfo"]["py_callstack"]) == (status == 1)  # the calls, of a defect alone

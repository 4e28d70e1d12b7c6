"""A rank's place is read from torchrun's variables, and what is wrong with them is named."""

import pytest

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.launch.cli import main
from dynapipe_ext.launch.processes.env import (
    RankEnv,
    child_environment,
    limit_threads,
    rank_env,
    store_password,
    under_torchrun,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def test_torchruns_variables_give_the_place_and_back() -> None:
    env = rank_env(TORCHRUN)
    assert env == RankEnv(
        rank=5, world_size=8, local_rank=1, local_world_size=4, master_addr="node0", master_port=29500
    )
    assert env.init_method == "env://"
    assert env.variables() == TORCHRUN


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("RANK", "", "RANK not set: start this with torchrun"),
        ("MASTER_ADDR", "", "MASTER_ADDR not set"),
        ("WORLD_SIZE", "eight", "WORLD_SIZE is 'eight'"),
        ("RANK", "8", r"RANK is 8 but must be in 0\.\.7"),
        ("LOCAL_RANK", "4", r"LOCAL_RANK is 4 but must be in 0\.\.3"),
    ],
)
def test_a_wrong_variable_is_named(name: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        rank_env({**TORCHRUN, name: value})


def test_the_process_environment_is_read_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DYNAPIPE_STORE_PASSWORD", "secret")
    assert (rank_env().rank, under_torchrun(), store_password()) == (5, True, "secret")
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("DYNAPIPE_STORE_PASSWORD", "")
    assert (under_torchrun(), store_password()) == (False, None)
    assert child_environment({"RANK": "1"})["RANK"] == "1"


def test_the_users_number_of_threads_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert limit_threads(1) == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert limit_threads(2) == 2


def test_every_command_asks_for_devices_in_a_way_that_lets_it_fork_ranks(monkeypatch) -> None:
    """Else ranks that are forked afterwards cannot use CUDA."""
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    with pytest.raises(SystemExit):
        main(["profile", "--help"])
    assert child_environment()["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"

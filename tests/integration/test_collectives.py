"""A rank that waits in a collective for one that never comes ends in time, and says what it was doing."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dynapipe_ext.errors import ExecutionError, named_collectives


def test_a_late_peer_is_an_error_with_the_name_of_the_step(run_ranks):
    def main(env):
        dist.init_process_group("gloo", env.init_method, rank=env.rank, world_size=2, timeout=timedelta(seconds=20))
        group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
        if env.rank == 1:
            time.sleep(4)  # the fault under test: alive, but not where the others are
            return ""
        try:
            with named_collectives("step 7, 0F3"):
                dist.all_reduce(torch.ones(4), group=group)
        except ExecutionError as error:
            return str(error)
        return "no error"

    message = run_ranks(2, main)[0]
    assert message.startswith("step 7, 0F3: another rank that takes part in it is late or gone")


def test_other_errors_pass_unchanged():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), named_collectives("step 1"):
        torch.ones(2, 3) @ torch.ones(2, 3)

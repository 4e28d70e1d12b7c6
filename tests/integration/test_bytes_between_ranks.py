"""Bytes and JSON from one rank to all and from each rank, and plans that ranks compare, over gloo."""

from datetime import timedelta

import torch
import torch.distributed as dist

from dynapipe_ext.errors import ExecutionError
from dynapipe_ext.executor.device import check_same_plans, gather_bytes, gather_json, send_bytes, send_json
from dynapipe_ext.launch.processes.env import RankEnv
from tests.support.limits import LIMIT_S
from tests.support.rank_jobs import in_turn

CPU = torch.device("cpu")
SENTENCE = "start all ranks with the same arguments, the same cost file and the same version of dynapipe-ext"


def refusal(text: str, pipeline: dist.ProcessGroup | None) -> str:
    try:
        check_same_plans(text, CPU, what="steps of these data", pipeline=pipeline)
    except ExecutionError as error:
        return str(error)
    return ""


def exchanged(env: RankEnv) -> dict[str, object]:
    dist.init_process_group(
        "gloo",
        init_method=env.init_method,
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=LIMIT_S),
    )
    last_two, rank = dist.new_group([1, 2]), env.rank
    in_group = rank > 0
    result: dict[str, object] = {
        "rank": rank,
        "sent": send_bytes(b"of rank %d" % rank, CPU, source=2),
        "sent empty": send_bytes(b"" if rank == 1 else b"another", CPU, source=1),
        "sent json": send_json({"rank": rank}, 0, None, CPU),
        "on all": gather_bytes(b"x" * rank, CPU),
        "on the first": gather_bytes(b"y" * rank, CPU, to_first=True),
        "on the first of a group": gather_bytes(b"z" * rank, CPU, group=last_two, to_first=True) if in_group else None,
        "json of a group": gather_json([rank], CPU, last_two) if in_group else None,
        "alike": refusal("a plan", None),
        "unlike": refusal("a plan" if rank < 2 else "another", None),
        "unlike in a pipeline": refusal(f"plan {rank}", last_two) if in_group else None,
    }
    dist.barrier()
    dist.destroy_process_group()
    return result


def test_ranks_get_what_others_send_and_refuse_plans_that_differ() -> None:
    first, *others = in_turn({"exchanges": (3, exchanged)})["exchanges"]
    for result in (first, *others):
        assert result["sent"] == b"of rank 2"
        assert result["sent empty"] == b""
        assert result["sent json"] == {"rank": 0}
        assert result["on all"] == [b"", b"x", b"xx"]
        assert result["on the first of a group"] == {1: [b"z", b"zz"], 2: []}.get(result["rank"])
        assert result["alike"] == ""
        assert result["unlike"] == f"ranks 0 and 2 planned the steps of these data differently: {SENTENCE}"
    assert first["on the first"] == [b"", b"y", b"yy"]
    for result in others:
        assert result["on the first"] == []
        assert result["json of a group"] == [[1], [2]]
        assert result["unlike in a pipeline"] == (
            f"pipeline ranks 0 and 1 planned the steps of these data differently: {SENTENCE}, and give all stages the"
            " same numbers and lengths"
        )

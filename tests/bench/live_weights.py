"""Bytes a second of weights out of a running model and into it, by their names on the Hub, beside plain copies.

    python tests/bench/live_weights.py [--hidden 1024] [--layers 8] [--output results/live_weights.json]

A Llama and a Qwen3-MoE with drawn weights lie on real ranks over gloo. All bytes of the whole model, over the seconds
until the last of its tensors is there; medians of runs that take turns:

- "copy": one process copies every tensor once, as it would beside a sampler in its own memory;
- "broadcast": every tensor of the model, whole on one rank, goes to the others by one collective: what any way of
  giving all ranks all weights takes at least;
- "export": `export_hf_weights` to all ranks in buckets, "export to first": to the first rank alone;
- "load": `load_hf_weights` of tensors that every rank has.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import provenance

sys.path.remove(str(Path(__file__).parent))  # whose megatron.py is a bench
sys.path.insert(0, str(Path(__file__).parents[2]))

from megatron.core import parallel_state

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.executor.stages.megatron.model import (
    build_chunks,
    build_model,
    initialize_parallel,
    transformer_config,
)
from dynapipe_ext.executor.stages.megatron.stage import wrap_ddp
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.named_models import read_model
from dynapipe_ext.tools.checkpoint import export_hf_weights, load_hf_weights, weight_buckets
from tests.support.published_models import ranks

RESULTS = Path(__file__).parent / "results"
CPU = torch.device("cpu")
BUCKET_BYTES = 64 << 20
RUNS = 5


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    model: dict[str, Any]  # a published config.json
    topology: Topology
    ep: int = 1


def cases(hidden: int, layers: int) -> list[Case]:
    sizes = {"vocab_size": 32_000, "hidden_size": hidden, "num_hidden_layers": layers, "rms_norm_eps": 1e-5}
    sizes |= {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128, "head_dim": 64}
    sizes |= {"max_position_embeddings": 4096, "tie_word_embeddings": False, "hidden_act": "silu"}
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "intermediate_size": 3 * hidden, **sizes}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": hidden // 2, "norm_topk_prob": True}
    qwen = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1}
    qwen |= {"intermediate_size": 3 * hidden, "mlp_only_layers": [], **experts, **sizes}
    return [
        Case("llama, tp 2 pp 2", llama, Topology(tp=2, pp=2)),
        Case("llama, pp 2 in a V", llama, Topology(pp=2, placement=(0, 1, 1, 0))),
        Case("qwen3-moe, pp 2 ep 2", qwen, Topology(pp=2, dp=2), ep=2),
    ]


def seconds(run: Callable[[], object]) -> float:
    dist.barrier()
    start_s = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - start_s


def broadcast(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        dist.broadcast(tensor, 0)


def export(chunks: list[Any], architecture: Architecture, **options: Any) -> None:
    for bucket in weight_buckets(export_hf_weights(chunks, architecture, **options), BUCKET_BYTES):
        del bucket


def measured(case: Case, config_file: Path, rank: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    architecture, _ = read_model(str(config_file))
    initialize_parallel(case.topology, 0, architecture=architecture)
    config = transformer_config(architecture, case.topology, dtype="float32")
    if case.ep > 1:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=case.topology.pp, expert_model_parallel_size=case.ep
        )
        config.expert_model_parallel_size = case.ep

    def stage(number: int) -> Any:
        return build_model(architecture, case.topology, number, config, seed=0, device=CPU)

    own = build_chunks(architecture, case.topology, case.topology.coordinates(rank).pp_rank, stage)
    chunks = [wrap_ddp(chunk, config) for chunk in own]
    whole = dict(export_hf_weights(chunks, architecture))
    num_bytes = sum(tensor.nbytes for tensor in whole.values())
    others = {name: torch.empty_like(tensor) for name, tensor in whole.items()}

    def copy() -> None:
        if rank == 0:
            for name, tensor in whole.items():
                others[name].copy_(tensor)

    ways: dict[str, Callable[[], object]] = {
        "copy": copy,
        "broadcast": lambda: broadcast(others),
        "export": lambda: export(chunks, architecture),
        "export to first": lambda: export(chunks, architecture, receivers="first"),
        "load": lambda: load_hf_weights(chunks, architecture, whole.items()),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(RUNS):
        for name, way in ways.items():
            times[name].append(seconds(way))
    rates = {name: round(num_bytes / statistics.median(taken) / 1e9, 3) for name, taken in times.items()}
    return {"gigabytes": round(num_bytes / 1e9, 3), "gigabytes_a_second": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--machine", default="")
    parser.add_argument("--output", type=Path, default=RESULTS / "live_weights.json")
    args = parser.parse_args()
    found = {}
    for case in cases(args.hidden, args.layers):
        with tempfile.TemporaryDirectory() as folder:
            (config := Path(folder) / "config.json").write_text(json.dumps(case.model))
            of_ranks = ranks(case.topology.world_size, Path(folder), partial(measured, case, config))
        found[case.name] = of_ranks[0]
        print(case.name, json.dumps(found[case.name]), flush=True)
    args.output.write_text(json.dumps({**provenance(args.machine), "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""A user's training script on megatron.core alone: two virtual stages a rank, and the interleaved schedule of Megatron
by its name. `python -m dynapipe_ext.megatron` runs it as it is."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from dynapipe_ext.launch.processes.env import rank_env
from tests.support.megatron_loops import LENGTH, ROWS, Loop, batches, forward_step, start

if __name__ == "__main__":
    env = rank_env()
    dist.init_process_group("gloo", rank=env.rank, world_size=env.world_size)
    chunks, config = start(Loop(pp=2, chunks=2))
    iterators = [batches(0), batches(0)]
    learning_rate = float(sys.argv[1])
    for step in range(4):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        run = get_forward_backward_func()
        reports = run(
            forward_step_func=forward_step,
            data_iterator=iterators,
            model=chunks,
            num_microbatches=4,
            seq_length=LENGTH,
            micro_batch_size=ROWS,
        )
        with torch.no_grad():
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter -= learning_rate * parameter.main_grad
        if parallel_state.is_pipeline_last_stage():
            total = torch.stack([report["lm loss"] for report in reports]).sum(dim=0)
            print(f"{type(run).__name__} step {step}: {float(total[0] / total[1]):.6f}", flush=True)

"""One rank of a loop's run: `python -m tests.bench.real_loops.run_rank MODULE FOLDER KIND [MODEL]`."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist


def main() -> None:
    module, folder, kind, *choices = sys.argv[1:]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    loop = importlib.import_module(f"tests.bench.real_loops.{module}")
    if kind == "data":
        loop.write_data(Path(folder))
        return
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    found = loop.main(Path(folder), kind, *choices)
    (Path(folder) / f"{kind}.{rank}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

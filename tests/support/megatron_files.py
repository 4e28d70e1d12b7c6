"""Published models of tests, their conversion to Megatron's layouts, and what is changed in the files of these."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dynapipe_ext.tools.checkpoint import converter
from dynapipe_ext.tools.checkpoint.formats import WriterOptions
from tests.support.checkpoints import saved, tiny_variant

Published = Callable[[str], Path]


def published_in(folder: Path) -> Published:
    """A published model's folder by the name of its variant."""

    def place(name: str) -> Path:
        if not (folder / name).exists():
            saved(tiny_variant(name), folder / name, tokenizer=name == "llama")
        return folder / name

    return place


def convert(source: Path, target: Path, to: str, *, verify: bool = False, tp: int = 1, **options: Any) -> Path:
    own = {"transformer_impl": options.pop("impl")} if "impl" in options else {}
    layers = options.pop("layers", ())
    settled = WriterOptions(tp=tp, pp=options.pop("pp", len(layers) or 1), layers_per_stage=layers)
    converter.convert(converter.prepare_conversion(source, target, to, settled, verify=verify, **own))
    return target


def edited_metadata(root: Path, edit: Callable[[Any], None]) -> Path:
    path = root / "release" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))
    return root


def rank_file(root: Path, rank: str = "mp_rank_00") -> Path:
    return root / "release" / rank / "model_optim_rng.pt"


def edited_rank(root: Path, edit: Callable[[dict[str, Any]], None], rank: str = "mp_rank_00") -> Path:
    state = torch.load(rank_file(root, rank), weights_only=False)
    edit(state)
    torch.save(state, rank_file(root, rank))
    return root

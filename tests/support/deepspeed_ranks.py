"""Real DeepSpeed engines on gloo ranks: what they save, and what they make of a checkpoint.

Import this at the top of a test module: DeepSpeed is imported once, before ranks are forked.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import logger, safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from dynapipe_ext.executor.stages.deepspeed.engine import ask_for_devices_once, compile_nothing, keep_steps_apart
from dynapipe_ext.launch.processes.cluster import run_local
from dynapipe_ext.launch.processes.env import RankEnv
from tests.support.checkpoints import tiny
from tests.support.limits import LIMIT_S

compile_nothing()  # a killed compilation hangs every later run
ask_for_devices_once()

VOCAB = 101


@dataclass(frozen=True, slots=True)
class Run:
    """A short training with an engine that is saved after `steps`, and then where asked for `goes_on`."""

    build: Callable[[], Any]  # a transformers model
    stage: int
    bf16: bool = False
    frozen: tuple[str, ...] = ()
    two_groups: bool = False
    steps: int = 2
    goes_on: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)


def save_runs(runs: Mapping[str, Run], folder: Path, num_ranks: int = 2) -> None:
    """Train and save each run in `folder`/NAME, with its model's config.json, and truth.pt beside the tag.

    truth.pt has what the live engine says: "master", "exp_avg", "exp_avg_sq" by name, "weight" (where the module has
    it) and of a run that goes on the "losses" of two more steps by rank.
    """
    _in_ranks(lambda env: [_save(env, run, folder / name) for name, run in runs.items()], num_ranks)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What an engine has after load_checkpoint: state by name, parameter groups, losses of two steps by rank (of one
    where it has loaded weights alone)."""

    states: Mapping[str, Mapping[str, torch.Tensor]]
    groups: Sequence[Mapping[str, Any]]
    losses: Sequence[Sequence[float]]


def load_runs(loads: Sequence[tuple[Path, Run, Mapping[str, Any]]], folder: Path, num_ranks: int = 2) -> list[Loaded]:
    """For each (checkpoint, run, arguments of load_checkpoint, of which "universal" is the configuration's).

    Until it has loaded, the engine's weights are 0 and its learning rate and weight decay are others.
    """

    def main(env: RankEnv) -> None:
        found = [_load_and_step(env, path, run, arguments) for path, run, arguments in loads]
        torch.save(found, folder / f"loaded-{env.rank}.pt")

    _in_ranks(main, num_ranks)
    by_rank = [torch.load(folder / f"loaded-{rank}.pt") for rank in range(num_ranks)]
    return [Loaded(*by_rank[0][i][:2], [by_rank[rank][i][2] for rank in range(num_ranks)]) for i in range(len(loads))]


def batch(step: int, rank: int) -> torch.Tensor:
    """Tokens that a rank sees in a step; shape (2, 16)."""
    return torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(10 * step + rank))


def universal_by_deepspeed(source: Path, destination: Path) -> None:
    """What DeepSpeed's own ds_to_universal.py makes of a saved run. It starts processes: call it in a main program."""
    from argparse import Namespace

    from deepspeed.checkpoint import ds_to_universal

    tag = source / (source / "latest").read_text().strip()
    destination.mkdir()
    # Its workers would be new processes, which import all again: work in this one.
    ds_to_universal._do_parallel_work = lambda work, chunks, _workers: [work(chunk) for chunk in chunks]
    arguments = Namespace(
        input_folder=str(tag),
        output_folder=str(destination / f"{tag.name}_universal"),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with quiet():
        ds_to_universal.main(arguments)
    (destination / "config.json").write_bytes((source / "config.json").read_bytes())


def fp32_by_deepspeed(folder: Path) -> dict[str, torch.Tensor]:
    """What DeepSpeed's own zero_to_fp32.py makes of a saved run."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with quiet():
        return dict(get_fp32_state_dict_from_zero_checkpoint(str(folder)))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _in_ranks(main: Callable[[RankEnv], Any], num_ranks: int) -> None:
    def rank_main(env: RankEnv) -> int:
        logger.setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        env.export()
        limit = timedelta(seconds=LIMIT_S)
        dist.init_process_group(
            "gloo", init_method=env.init_method, rank=env.rank, world_size=env.world_size, timeout=limit
        )
        with quiet():
            deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
            main(env)
        dist.barrier()
        dist.destroy_process_group()
        return 0

    run_local(rank_main, num_ranks, timeout_s=LIMIT_S)


def _engine(run: Run, *, is_new: bool = False, universal: bool = False) -> Any:
    lr, decay = (0.5, 0.25) if is_new else (1e-2, 0.1)
    model = run.build()
    model.config.use_cache = False
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in run.frozen)
        if is_new:
            parameter.data.zero_()
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[Any] = parameters
    if run.two_groups:
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": decay / 10},
        ]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": run.bf16},
        **run.config,
    }
    config["zero_optimization"] = {"stage": run.stage, **run.config.get("zero_optimization", {})}
    if universal:
        config["checkpoint"] = {"load_universal": True}
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=lr), config=config)[0]
    keep_steps_apart(engine)
    return engine


def _step(engine: Any, step: int, rank: int) -> float:
    tokens = batch(step, rank)
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    return float(loss)


def _save(env: RankEnv, run: Run, folder: Path) -> None:
    engine = _engine(run)
    for step in range(run.steps):
        _step(engine, step, env.rank)
    engine.save_checkpoint(str(folder))
    truth: dict[str, Any] = _states(engine) if run.stage else {}
    if run.stage < 3:
        truth["weight"] = {name: _copy(value) for name, value in engine.module.state_dict().items()}
    if run.goes_on:
        truth["losses"] = [_step(engine, run.steps + i, env.rank) for i in range(2)]
    torch.save(truth, folder / f"truth-{env.rank}.pt")
    if env.rank == 0:
        engine.module.config.save_pretrained(folder)
    engine.destroy()


def _states(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Masters and moments of every trained parameter, whole, as the engine itself tells them."""
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        # After the first group's step it links the states of all groups, of which the others have none yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found: dict[str, dict[str, torch.Tensor]] = {"master": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found["master"][name] = _copy(safe_get_full_fp32_param(parameter))
            for kind in ("exp_avg", "exp_avg_sq"):
                found[kind][name] = _copy(safe_get_full_optimizer_state(parameter, kind))
    return found


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _load_and_step(env: RankEnv, path: Path, run: Run, arguments: Mapping[str, Any]) -> tuple[Any, Any, list[float]]:
    arguments = dict(arguments)
    engine = _engine(run, is_new=True, universal=arguments.pop("universal", False))
    engine.load_checkpoint(str(path), **arguments)
    states = {} if arguments.get("load_module_only") else _states(engine)
    groups = [{"lr": group["lr"], "weight_decay": group["weight_decay"]} for group in engine.optimizer.param_groups]
    num_steps = 1 if arguments.get("load_module_only") else 2
    losses = [_step(engine, run.steps + i, env.rank) for i in range(num_steps)]
    engine.destroy()
    return states, groups, losses


class _Embedding(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding.from_pretrained(weight.clone(), freeze=False)

    @property
    def weight(self) -> torch.Tensor:
        return self.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(tokens)


class _Block(nn.Module):
    def __init__(self, config: Any, layer: LlamaDecoderLayer) -> None:
        super().__init__()
        self.layer = LlamaDecoderLayer(config, 0)
        self.layer.load_state_dict(layer.state_dict())
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(hidden.shape[1])[None]
        found = self.layer(hidden, position_embeddings=self.rotary(hidden, positions), attention_mask=None)
        return found[0] if isinstance(found, tuple) else found


class _Norm(LlamaRMSNorm):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(len(weight))
        self.weight.data.copy_(weight)


class _Head(nn.Linear):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False)
        self.weight.data.copy_(weight)


def _tied_head(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    return functional.linear(hidden, module.weight)


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def save_pipelines(runs: Mapping[str, Run], folder: Path) -> None:
    """Llama models as pipelines of two stages, trained two steps and saved in `folder`/NAME; truth-RANK.pt has the
    parameters of a stage by their names in the pipeline."""

    def main(env: RankEnv) -> None:
        for name, run in runs.items():
            _save_pipeline(env, run, folder / name)

    _in_ranks(main, 2)


def _save_pipeline(env: RankEnv, run: Run, folder: Path) -> None:
    model = run.build()
    embedding = model.model.embed_tokens.weight.detach()
    blocks = [LayerSpec(_Block, model.config, layer) for layer in model.model.layers]
    norm = LayerSpec(_Norm, model.model.norm.weight.detach())
    layers: list[Any] = [
        LayerSpec(_Embedding, embedding),
        *blocks,
        norm,
        LayerSpec(_Head, model.lm_head.weight.detach()),
    ]
    if model.config.tie_word_embeddings:
        layers[0] = TiedLayerSpec("embed", _Embedding, embedding)
        layers[-1] = TiedLayerSpec("embed", _Embedding, embedding, forward_fn=_tied_head)
    net = PipelineModule(layers, num_stages=2, loss_fn=_loss, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": run.stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": run.bf16},
    }
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    engine = deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]
    batches = iter([(batch(i, 0), batch(i, 0)) for i in range(4)])
    for _ in range(2):
        engine.train_batch(batches)
    engine.save_checkpoint(str(folder))
    torch.save({name: _copy(p) for name, p in net.named_parameters()}, folder / f"truth-{env.rank}.pt")
    if env.rank == 0:
        model.config.save_pretrained(folder)


# Sizes that no number of ranks divides: flat groups end in padding, and so does each slice of stage 3.
SMALL = {
    "hidden_size": 20, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "vocab_size": VOCAB,
}  # fmt: skip
FROZEN = ("model.layers.0.mlp.down_proj.weight", "model.norm.weight")


def tied() -> Any:
    return tiny("llama", **SMALL, tie_word_embeddings=True)


def untied() -> Any:
    return tiny("qwen2", **SMALL)


def experts() -> Any:
    return tiny("mixtral", **{**SMALL, "num_local_experts": 3, "intermediate_size": 36})


RUNS = {
    "stage1": Run(tied, 1, goes_on=True),
    "stage2": Run(tied, 2, two_groups=True),
    "stage3": Run(tied, 3, config={"zero_optimization": {"sub_group_size": 1000, "round_robin_gradients": True}}),
    "stage1-bf16": Run(untied, 1, goes_on=True, bf16=True, two_groups=True),
    "stage2-bf16-frozen": Run(untied, 2, bf16=True, frozen=FROZEN, two_groups=True),
    "stage3-bf16-frozen": Run(untied, 3, bf16=True, frozen=FROZEN, two_groups=True),
    "stage2-aligned": Run(untied, 2, config={"zero_optimization": {"parameter_alignment": True}}),
    "stage1-bf16-optimizer": Run(tied, 1, bf16=True, config={"data_types": {"grad_accum_dtype": "fp32"}}),
    "stage1-experts": Run(experts, 1),
    "stage3-experts": Run(experts, 3, goes_on=True),
    "stage0": Run(tied, 0),
    "stage0-bf16": Run(tied, 0, bf16=True),
}
PARTITIONED = [name for name, run in RUNS.items() if run.stage]

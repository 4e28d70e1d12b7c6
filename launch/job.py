"""What a job is before it has ranks: its data, its model's shape, its costs, its planners. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from dynapipe_ext.activations import ActivationFormat
from dynapipe_ext.config import SPLIT_SCHEDULES, Rule, ScheduleName, TrainConfig
from dynapipe_ext.costs.analytic import AnalyticCosts, ModelShape
from dynapipe_ext.costs.fitted import FittedCosts
from dynapipe_ext.costs.interchange import cost_model_from_json
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.costs.table import CostTable
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.data.batches import GlobalBatches
from dynapipe_ext.data.dataset import TokenDataset, fingerprint_of_source, is_prepared, open_prepared, prepare
from dynapipe_ext.data.generation import generate_examples, generator_settings
from dynapipe_ext.data.reading import Example, read_examples
from dynapipe_ext.errors import ConfigError, DataError, PlanError
from dynapipe_ext.launch.file_lock import FileLock
from dynapipe_ext.launch.run_directory import runs_folder
from dynapipe_ext.lengths import LengthArray, sample_lengths
from dynapipe_ext.plan import RECOMPUTES, Layout, MicroBatch, round_up
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.topology import Topology

# One multiple for all topologies: the padded vocabulary, and with it the weights, must not depend on tp.
_VOCAB_MULTIPLE = 128
_OURS = "dynapipe-ext"
# How long ranks wait for data to be tokenized and costs to be measured; a failure of who does it ends the job at once.
PREPARE_LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of planning the same job; `--compare` runs several."""

    name: str
    layout: Layout
    schedule: ScheduleName
    rule: Rule
    max_tokens: int
    fill_waits: bool = False


def variants(config: TrainConfig, *, compare: bool) -> list[Variant]:
    """The configured run, and with `compare` the three usual ways beside it."""
    plan, row_len = config.plan, config.model.max_seq_len
    ours = Variant(_OURS, plan.layout, plan.schedule, plan.rule, plan.max_tokens, plan.fill_waits)
    if not compare:
        return [ours]
    return [
        ours,
        Variant("padding to the batch maximum, 1F1B", "padded", "1f1b", "batch-max", 0),
        Variant("packing into fixed rows, whole-row attention, 1F1B", "packed", "1f1b", "fixed-rows", row_len),
        Variant("packing, document attention, balanced, 1F1B", "packed", "1f1b", "packed-balanced", row_len),
    ]


def topology_of(config: TrainConfig) -> Topology:
    """The topology with layers on its stages. Raises ConfigError for what does not divide, naming both numbers."""
    t, m = config.topology, config.model
    topology = Topology(tp=t.tp, pp=t.pp, dp=t.dp, layers_per_stage=t.layers_per_stage).with_layers(m.num_layers)
    for name in ("num_heads", "num_query_groups", "ffn_hidden_size", "hidden_size"):
        if getattr(m, name) % t.tp:
            raise ConfigError(f"tp is {t.tp} but does not divide {name} {getattr(m, name)}: choose another tp or size")
    if _VOCAB_MULTIPLE % t.tp:
        raise ConfigError(f"tp is {t.tp} but must divide {_VOCAB_MULTIPLE}: choose a power of two up to that")
    if t.sequence_parallel and config.plan.pad_multiple % t.tp:
        raise ConfigError(
            f"pad_multiple is {config.plan.pad_multiple} but sequence parallelism cuts rows in tp = {t.tp} parts:"
            f" make it a multiple of {t.tp}"
        )
    if m.position == "learned" and m.max_seq_len % config.plan.pad_multiple:
        longest = round_up(m.max_seq_len, config.plan.pad_multiple)
        raise ConfigError(
            f"max_seq_len is {m.max_seq_len} but rows are rounded up to pad_multiple {config.plan.pad_multiple}, to"
            f" {longest} positions of which only {m.max_seq_len} are learned: make max_seq_len {longest} or another"
            " multiple of pad_multiple"
        )
    return topology


def model_shape(config: TrainConfig, vocab_size: int) -> ModelShape:
    m = config.model
    return ModelShape(
        num_layers=m.num_layers,
        hidden_size=m.hidden_size,
        num_heads=m.num_heads,
        num_query_groups=m.num_query_groups,
        ffn_hidden_size=m.ffn_hidden_size,
        gated_mlp=m.gated_mlp,
        vocab_size=round_up(vocab_size, _VOCAB_MULTIPLE),
        max_seq_len=m.max_seq_len,
        tied_embeddings=m.tied_embeddings,
        position=m.position,
        norm=m.norm,
        bias=m.bias,
    )


def data_folder(config: TrainConfig) -> Path:
    """Where the tokens of a run are: in the user's own folder, or beside the run, by what they were made from, so that
    the next run finds them. Errors: DataError for a file that cannot be read.
    """
    return Path(config.data.path) if _is_tokens(config) else _source(config).folder


def prepare_data(config: TrainConfig, progress: Callable[[int], None] | None = None) -> TokenDataset:
    """Tokenize the user's file, or the generator's examples, into `data_folder`; opens what is already there, and a
    folder that `dynapipe preprocess` wrote. Of several runs that want the same data at once, one makes them.
    """
    data = config.data
    if _is_tokens(config):
        return open_prepared(data.path, max_seq_len=config.model.max_seq_len)
    source = _source(config)
    lock = source.folder.with_name(f".{source.folder.name}.lock")
    with FileLock(lock, f"the tokenized data in {source.folder}", wait_s=PREPARE_LIMIT_S):
        return prepare(
            source.examples,
            source.folder,
            tokenizer=data.tokenizer,
            vocab_size=data.vocab_size if data.tokenizer == "bpe" else None,
            max_seq_len=config.model.max_seq_len,
            truncate=data.truncate,
            source_fingerprint=source.fingerprint,
            progress=progress,
        )


def _is_tokens(config: TrainConfig) -> bool:
    return bool(config.data.path) and is_prepared(config.data.path)


@dataclass(frozen=True, slots=True)
class _Source:
    """Text to tokenize, and the folder for its tokens."""

    examples: Callable[[], Iterator[Example]]
    fingerprint: str
    folder: Path


def _source(config: TrainConfig) -> _Source:
    data, seed = config.data, config.run.seed
    if data.path:
        path = Path(data.path)
        examples, fingerprint = partial(read_examples, path), fingerprint_of_source(path)
    else:
        examples = partial(generate_examples, num_samples=data.num_samples, seed=seed)
        fingerprint = fingerprint_of_source(generator_settings(num_samples=data.num_samples, seed=seed))
    vocab_size = data.vocab_size if data.tokenizer == "bpe" else 0
    made_from = [fingerprint, data.tokenizer, vocab_size, config.model.max_seq_len, data.truncate]
    name = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]
    return _Source(examples, fingerprint, runs_folder(config.run.run_dir) / "tokenized" / name)


def analytic_costs(config: TrainConfig, shape: ModelShape, *, flops_per_s: float, overhead_ns: int) -> AnalyticCosts:
    """Counted FLOPs at a given rate, counted bytes."""
    return configured_costs(config, AnalyticCosts(shape, Topology(), flops_per_s=flops_per_s, overhead_ns=overhead_ns))


def configured_costs(config: TrainConfig, costs: AnalyticCosts) -> AnalyticCosts:
    """Rates and factors as they were measured; what follows from the settings (topology, dtype, sharding) from them."""
    wide, plan = config.model.dtype == "float32", config.plan
    return replace(
        costs,
        topology=topology_of(config),
        activation_bytes_per_value=4 if wide else 2,
        param_bytes=4 if wide else 2,
        sequence_parallel=config.topology.sequence_parallel and config.topology.tp > 1,
        dropout=config.model.dropout > 0,
        distributed_optimizer=config.optimizer.distributed,
        split_backward=plan.split_backward or plan.schedule in SPLIT_SCHEDULES,
        zero_stage=0,
        ep=1,
    )


def read_costs(path: str | Path, topology: Topology | None) -> tuple[CostModel, Topology]:
    """The cost model in a JSON file of any kind, over `topology`, or with None over the one it was made for.

    Fitted costs are those of the stages that ran: of another topology they take the number of replicas alone. Errors:
    DataError for a file that holds none; ConfigError where it cannot be laid out over the topology.
    """
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"cost file {path} cannot be read: {error}: give a cost model written as JSON") from error
    if not isinstance(raw, dict):
        raise DataError(f"cost file {path} holds {type(raw).__name__}: give a cost model written as JSON")
    return _laid_out(cost_model_from_json(raw), topology)


def costs_over(costs: CostModel, topology: Topology) -> CostModel:
    """The same cost model over a topology. Errors: ConfigError where it cannot be laid out over it."""
    return _laid_out(costs, topology)[0]


def _laid_out(costs: CostModel, topology: Topology | None) -> tuple[CostModel, Topology]:
    match costs:
        case FittedCosts():
            return _fitted_over(costs, topology)
        case CostTable():
            return (costs, costs.topology) if topology is None else (costs.with_topology(topology), topology)
        case AnalyticCosts():
            topology = costs.topology if topology is None else topology.with_layers(costs.shape.num_layers)
            return replace(costs, topology=topology), topology
        case _:
            return costs, topology or Topology(pp=costs.num_stages)


def _fitted_over(costs: FittedCosts, topology: Topology | None) -> tuple[FittedCosts, Topology]:
    base = costs.base
    if isinstance(base, TokenCosts):
        return costs, topology or Topology(pp=base.num_stages)
    num_layers = base.num_layers if isinstance(base, CostTable) else base.shape.num_layers
    recorded = base.topology.with_layers(num_layers)
    asked = recorded if topology is None else topology.with_layers(num_layers)
    if replace(asked, dp=recorded.dp) != recorded:
        raise ConfigError(
            f"the costs were fitted to runs of {_stages(recorded)} but {_stages(asked)} are asked for: record runs of"
            " these, or give costs that were not fitted"
        )
    return replace(costs, base=replace(base, topology=asked)), asked


def _stages(topology: Topology) -> str:
    layers = ", ".join(map(str, topology.layers_per_stage))
    return f"{topology.num_stages} stages of {layers} layers on tp {topology.tp} x pp {topology.pp}"


def check_batches(config: TrainConfig, lengths: LengthArray) -> None:
    """Refuse a sample over the token budget before anything is started. Errors: DataError naming it."""
    GlobalBatches(
        lengths,
        batch_size=config.data.batch_size or None,
        tokens_per_batch=config.data.tokens_per_batch or None,
        seed=config.run.seed,
    )


def check_fits(config: TrainConfig, costs: CostModel, lengths: LengthArray) -> None:
    """Refuse a sample that fits no micro-batch or no rank even alone, before the launch.

    Errors: PlanError naming the longest such sample.
    """
    _check_max_tokens(config, lengths)
    longest = int(np.argmax(lengths[:, 0] + lengths[:, 1]))
    (sample,) = sample_lengths(lengths, [longest])
    plan, limit = config.plan, int(config.plan.memory_limit_gb * 1e9)
    needs: list[tuple[int, int]] = []  # (bytes, stage) of the fullest stage, for each kind of recomputation
    refusal: PlanError | None = None
    for kind in RECOMPUTES if plan.recompute == "auto" else (plan.recompute,):
        try:
            alone = costs.evaluate([MicroBatch((sample,), plan.layout, kind, pad_multiple=plan.pad_multiple)])
        except PlanError as error:  # a kind that was not measured, or a shape outside the table
            refusal = refusal or error
            continue
        total = alone.static_bytes + alone.stored_bytes[:, 0] + alone.working_bytes[:, 0]
        needs.append((int(total.max()), int(total.argmax())))
    if not needs:
        assert refusal is not None
        raise PlanError(f"sample {longest} with {sample.tokens} tokens cannot be priced: {refusal}")
    num_bytes, stage = min(needs)
    if num_bytes > limit:
        raise PlanError(
            f"sample {longest} with {sample.tokens} tokens needs {num_bytes} B on stage {stage} even alone, but"
            f" memory_limit_gb {plan.memory_limit_gb:g} is {limit} B a rank: raise it, raise tp or pp, or lower"
            " max_seq_len with --truncate"
        )


def _check_max_tokens(config: TrainConfig, lengths: LengthArray) -> None:
    """Refuse the sample furthest above the positions that max_tokens leaves one micro-batch, if there is one."""
    plan, sides = config.plan, lengths[:, :2]
    if not plan.max_tokens:
        return
    multiple = plan.pad_multiple
    if plan.layout == "packed":
        positions, room = sides.max(axis=1), plan.max_tokens // multiple * multiple
        least, row = round_up(int(positions.max()), multiple), "a packed row"
    else:
        positions, room = (-(-sides // multiple) * multiple).sum(axis=1), plan.max_tokens
        least, row = int(positions.max()), "a padded micro-batch"
    worst = int(positions.argmax())
    if positions[worst] > room:
        padded = f", {positions[worst]} padded" if plan.layout == "padded" else ""
        raise PlanError(
            f"sample {worst} has {int(sides[worst].sum())} tokens{padded}, but {row} has {room} positions (max_tokens"
            f" {plan.max_tokens}, pad_multiple {multiple}): raise max_tokens to at least {least}, or lower max_seq_len"
            " with --truncate"
        )


def make_planner(config: TrainConfig, costs: CostModel, variant: Variant) -> Planner:
    plan, model, topology = config.plan, config.model, topology_of(config)
    shards = topology.tp if config.topology.sequence_parallel else 1
    return Planner(
        topology,
        costs,
        int(plan.memory_limit_gb * 1e9),
        config.run.seed,
        layout=variant.layout,
        schedule=variant.schedule,
        rule=variant.rule,
        pad_multiple=plan.pad_multiple,
        max_tokens=variant.max_tokens,
        effort=plan.effort,
        split_backward=plan.split_backward and variant.name == _OURS,
        fill_waits=variant.fill_waits,
        loss_norm=plan.loss_norm,
        recompute=None if plan.recompute == "auto" else plan.recompute,
        equal_counts=plan.replica_counts == "equal",
        format=ActivationFormat(model.hidden_size, model.dtype, sequence_shards=shards),
    )

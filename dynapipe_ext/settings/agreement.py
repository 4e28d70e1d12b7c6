"""What the settings of a run must agree in: values that are each within their bounds, but not together."""

from __future__ import annotations

from dynapipe_ext.batch.micro_batches import Pieces
from dynapipe_ext.batch.topology import Topology, counts_of_layers, placement_of, widths_of
from dynapipe_ext.batch.vocabulary import spread_vocabulary
from dynapipe_ext.data.sample_selection import weighted_files
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.models.named_models import carried_fault
from dynapipe_ext.settings.plan_rules import check_placed, own_placement
from dynapipe_ext.settings.tables import (
    DataSettings,
    EvalSettings,
    ModelSettings,
    OptimizerSettings,
    PlacementChoice,
    PlanSettings,
    PreferenceSettings,
    TopologySettings,
)


def check_optimizer(optimizer: OptimizerSettings, where: str) -> None:
    """Refuse rates that no schedule of the learning rate has. Errors: ConfigError."""
    if len(optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in optimizer.betas):
        raise ConfigError(f"{where}: [optimizer] betas is {optimizer.betas} but must be two numbers of 0 to below 1")
    if optimizer.min_lr > optimizer.lr:
        raise ConfigError(
            f"{where}: [optimizer] min_lr is {optimizer.min_lr:g} but must be at most lr, which is {optimizer.lr:g}:"
            " lower min_lr too"
        )


def check_stages(topology: TopologySettings, plan: PlanSettings, where: str) -> None:
    """Refuse stages that cannot lie on ranks so, or not under the schedule. Errors: ConfigError."""
    try:
        counts_of_layers(topology.layers_per_stage)
    except ConfigError as error:
        raise ConfigError(f"{where}: [topology] {error}") from error
    placement: PlacementChoice = topology.placement or own_placement(plan.schedule)
    if "auto" in (placement, topology.vocabulary):
        at = f"{where}: [topology] {'placement' if placement == 'auto' else 'vocabulary'} is 'auto'"
        if topology.layers_per_stage:
            raise ConfigError(
                f"{at}, which chooses layers_per_stage, but that is {topology.layers_per_stage}: leave it out, or"
                " name a placement and a vocabulary"
            )
        if plan.schedule != "adaptive":
            raise ConfigError(
                f"{at}, but schedule {plan.schedule!r} runs under one alone, {own_placement(plan.schedule)}: leave"
                " placement out, or take the adaptive schedule"
            )
    name = "linear" if placement == "auto" else placement  # tried ones are made later
    try:
        layers = Topology(pp=topology.pp, placement=placement_of(name, topology.pp, topology.stages_per_rank or None))
        placed = layers if topology.vocabulary == "auto" else spread_vocabulary(layers, topology.vocabulary)
    except ConfigError as error:
        raise ConfigError(f"{where}: [topology] {error}") from error
    check_placed(plan.schedule, placed, f"{where}: [plan] ")


def check_width(topology: TopologySettings, model: ModelSettings, deepspeed_config: str, where: str) -> None:
    """Refuse data parallel ranks that cannot join so, or not for this model. Errors: ConfigError."""
    if topology.width == 1:
        return
    at = f"{where}: [topology] width is {topology.width!r}"
    if topology.width != "auto" and topology.width not in (allowed := widths_of(topology.dp)):
        raise ConfigError(
            f"{at} but must be a power of two that divides dp {topology.dp}: give one of {', '.join(map(str, allowed))}"
        )
    if deepspeed_config:
        raise ConfigError(f"{at} but a DeepSpeed engine computes whole rows on each rank: leave one of both out")
    if model.num_decoder_layers and model.uses_transformers:
        raise ConfigError(
            f"{at} but transformers' encoder-decoders add relative biases of whole rows, of which joined ranks have"
            " slices: set width to 1, or train the model by megatron-core"
        )


def check_data_settings(data: DataSettings, where: str) -> None:
    """Errors: ConfigError for settings that do not go together."""
    if (data.tokens_per_batch > 0) == (data.batch_size > 0):
        raise ConfigError(
            f"{where}: [data] tokens_per_batch is {data.tokens_per_batch} and batch_size is"
            f" {data.batch_size}: set exactly one of them above 0"
        )
    if data.mixture and data.path:
        raise ConfigError(
            f"{where}: [data] path is {data.path} and mixture is {list(data.mixture)}: leave one out, or name all"
            " files in mixture"
        )
    weighted_files(data.mixture)
    if data.num_workers and data.prefetch_steps < 2:
        raise ConfigError(
            f"{where}: [data] prefetch_steps is {data.prefetch_steps} but must be at least 2 with planner processes"
            f" (num_workers is {data.num_workers})"
        )
    if bool(data.input_key) != bool(data.target_key):
        raise ConfigError(
            f"{where}: [data] input_key is {data.input_key!r} and target_key {data.target_key!r}: give both"
        )


def check_preferences(
    preferences: PreferenceSettings, data: DataSettings, plan: PlanSettings, model: ModelSettings, where: str
) -> None:
    """Refuse what pairs of answers cannot be beside. Errors: ConfigError."""
    if not preferences.loss:
        if data.template == "preference":
            raise ConfigError(
                f"{where}: [data] template is 'preference' but [preferences] loss says of no loss to learn them by: set"
                " it, to dpo for example"
            )
        return
    at = f"{where}: [preferences] loss is {preferences.loss!r}"
    if model.num_decoder_layers:
        raise ConfigError(f"{at} but the model is an encoder-decoder, of whose samples pairs are not made: take GPTs")
    if plan.pieces != "off":
        raise ConfigError(f"{at} but [plan] pieces is {plan.pieces!r}, and a pair stays whole: set pieces to 'off'")
    if plan.rule not in ("dynapipe-ext", "packed-balanced"):
        raise ConfigError(f"{at} but [plan] rule {plan.rule!r} knows no pairs: take dynapipe-ext, or packed-balanced")
    if preferences.label_smoothing and preferences.loss != "dpo":
        raise ConfigError(
            f"{at} but label_smoothing is {preferences.label_smoothing:g}, which dpo alone has: leave it out"
        )


def check_evaluation(settings: EvalSettings, where: str) -> None:
    """Refuse an evaluation without data, with two kinds of them, or data that no evaluation reads."""
    table, choices = f"{where}: [eval]", {"path": settings.path, "fraction": settings.fraction, "steps": settings.steps}
    if settings.path and settings.fraction:
        raise ConfigError(
            f"{table} path is {settings.path} and fraction is {settings.fraction}: evaluate on data of their own or on"
            " a part of the training data, leave one out"
        )
    if settings.every and not (settings.path or settings.fraction):
        raise ConfigError(
            f"{table} every is {settings.every} but there is nothing to evaluate on: give path, held-out data, or"
            " fraction, the part of the training data to hold out, like 0.05"
        )
    if not settings.every and (named := [f"{name} is {value}" for name, value in choices.items() if value]):
        raise ConfigError(
            f"{table} {' and '.join(named)} but every is 0, which never evaluates: set every, or leave the others out"
        )


def check_heads(model: ModelSettings, topology: TopologySettings, where: str) -> None:
    """Refuse sizes of heads, positions and experts that no model has. Errors: ConfigError."""
    if model.described is not None:
        if model.described.num_experts and topology.tp > 1 and not topology.sequence_parallel:
            raise ConfigError(
                f"{where}: [model] architecture {model.architecture} has {model.described.num_experts} experts,"
                f" which Megatron trains with tp {topology.tp} under sequence parallelism alone: set [topology]"
                " sequence_parallel = true, or tp 1"
            )
        return
    if (model.position == "relative") != (model.num_decoder_layers > 0):
        raise ConfigError(
            f"{where}: [model] position is {model.position!r} and num_decoder_layers is {model.num_decoder_layers}:"
            " relative positions are those of an encoder-decoder, which has a decoder's layers, and no others"
        )
    if model.hidden_size % model.num_heads:
        raise ConfigError(
            f"{where}: [model] hidden_size is {model.hidden_size} but must be a multiple of num_heads, which is"
            f" {model.num_heads}"
        )
    if model.num_heads % model.num_query_groups:
        raise ConfigError(
            f"{where}: [model] num_heads is {model.num_heads} but must be a multiple of num_query_groups, which is"
            f" {model.num_query_groups}"
        )
    head_size = model.hidden_size // model.num_heads
    if model.position == "rope" and head_size % 2:
        raise ConfigError(
            f"{where}: [model] hidden_size / num_heads is {model.hidden_size} / {model.num_heads} = {head_size} but"
            ' must be even with position = "rope", which turns pairs of numbers'
        )


def check_pieces_of_model(model: ModelSettings, pieces: Pieces, where: str) -> None:
    """Refuse pieces of long samples where attention does not go on from piece to piece. Errors: ConfigError."""
    if pieces == "off":
        return
    if model.uses_transformers:
        fault = carried_fault(model.architecture)
    elif model.described is not None:
        fault = model.described.pieces_fault
    else:
        later = "inputs of an encoder-decoder attend to later positions: plan whole samples"
        fault = later if model.num_decoder_layers else ""
    if fault:
        raise ConfigError(f'{where}: [plan] pieces is {pieces!r} but {fault} (pieces = "off")')


def refuse_order_in_bits(
    model: ModelSettings, plan: PlanSettings, topology: TopologySettings, *, deepspeed_config: str, where: str
) -> None:
    """Refuse what deterministic mode cannot keep the plan out of. Errors: ConfigError."""
    at, pp = f"{where}: [optimizer] deterministic is on but", topology.pp
    if topology.width == "auto":  # a product over a slice of a row rounds otherwise than one over the row
        raise ConfigError(
            f"{at} [topology] width auto gives steps several widths, and bits hold for one: name it, or leave"
            " deterministic out"
        )
    if plan.adapt_costs:
        raise ConfigError(
            f"{at} [plan] adapt_costs makes plans by what actions have taken, which is never the same: leave one out"
        )
    if deepspeed_config:
        raise ConfigError(f"{at} a DeepSpeed engine sums gradients in an order of its own: leave one of both out")
    if model.described is not None and model.described.num_experts:
        raise ConfigError(
            f"{at} [model] architecture {model.architecture} has {model.described.num_experts} experts, which it does"
            " not cover: leave it out, or take a model without experts"
        )
    # Each layer of a decoder adds to the gradient of the encoder's output. Under full recomputation Megatron first adds
    # up the layers of a stage, and then the sum that the next stage sends: the order depends on where stages end.
    if model.num_decoder_layers and pp > 1 and plan.recompute in ("auto", "full", "head+full"):
        raise ConfigError(
            f"{at} [plan] recompute is {plan.recompute!r}: layers of a decoder that are recomputed whole add"
            " up gradients of the encoder's output in an order that depends on pp, so set recompute to 'none' or"
            " 'selective', or pp to 1"
        )

"""How a run's model is cut into stages where transformers computes it: proven before data are read."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dynapipe_ext.batch.document_attention import DOCUMENT_ATTENTION
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.models.layer_pattern import LayerPattern, ProvenCut, read_pattern
from dynapipe_ext.settings.train_config import TrainConfig


def needs_cut(config: TrainConfig) -> bool:
    """Whether the model is a decoder that transformers computes."""
    return config.model.uses_transformers and not config.model.num_decoder_layers


def named_pattern(config: TrainConfig) -> LayerPattern | None:
    """That of `[model] layer_pattern`, if there is one. Errors: ConfigError."""
    return read_pattern(config.model.layer_pattern) if config.model.layer_pattern else None


def configured_cut(config: TrainConfig) -> ProvenCut:
    """Where the run's model is cut. It computes, so not in a process that forks ranks. Errors: ConfigError."""
    from dynapipe_ext.executor.stages.transformers.parts import proven_cut_of_folder

    return proven_cut_of_folder(config.model.architecture, named_pattern(config))


def names_layout(file: str | None) -> bool:
    """Whether a file of settings, which has been read before, says how rows are laid out."""
    if not file:
        return False
    return "layout" in tomllib.loads(Path(file).read_text(encoding="utf-8-sig")).get("plan", {})


def settled_cut(
    config: TrainConfig,
    prove: Callable[[TrainConfig], ProvenCut] = configured_cut,
    *,
    layout_is_named: bool,
    compare: bool = False,
) -> TrainConfig:
    """The settings as all who train or plan go on with them: where transformers computes the model, with its proven
    cut and rows that are exact. Errors: ConfigError of the proof, and as `with_cut`."""
    if not needs_cut(config):
        return config
    return with_cut(config, prove(config), layout_is_named=layout_is_named, compare=compare)


def with_cut(config: TrainConfig, cut: ProvenCut, *, layout_is_named: bool, compare: bool = False) -> TrainConfig:
    """The settings with their model's cut, and with padded rows where packed ones are not exact.

    Errors: ConfigError where packed rows are asked for by name, or by what needs them.
    """
    config = replace(config, model=replace(config.model, cut=cut))
    plan, name = config.plan, config.model.architecture
    if plan.pieces != "off" and cut.attention != DOCUMENT_ATTENTION:
        raise ConfigError(
            f"pieces of a sample need {DOCUMENT_ATTENTION}, which is not exact in {name}: give --pieces off"
            + (f" ({cut.packed_fault})" if cut.packed_fault else "")
        )
    if plan.layout != "packed" or not cut.packed_fault:
        return config
    asker = "--compare packs rows" if compare else "layout is packed" if layout_is_named else ""
    if asker or plan.rule != TrainConfig().plan.rule:
        raise ConfigError(
            f"{asker or f'rule {plan.rule} packs rows'}, but packing is not exact in {name} ({cut.packed_fault}): give"
            " --layout padded" + (" and leave --compare out" if compare else "")
        )
    return config.with_values(plan={"layout": "padded"})


def layout_line(config: TrainConfig) -> str:
    """What is said where rows are padded since they cannot be packed; else nothing."""
    cut = config.model.cut
    if cut is None or not cut.packed_fault or config.plan.layout != "padded":
        return ""
    return f"rows are padded: packing is not exact in {config.model.architecture} ({cut.packed_fault})"

"""Proof that a causal model cut into stages is the same model, and that its rows are those of single documents.

It is run on a small model of the same class and settings (`twin`), on CPU, before weights are read. It proves

- of the cut: with every layer on a stage of its own (every half of one, where layers have halves), logits and all
  gradients are those of one stage, bit for bit;
- of padded rows: logits of samples padded behind to one length are those of each alone;
- of packed rows: so are those of documents in one row, at every length that changes what the family computes, as
  `check_packing` has it (windows, chunks: they are shortened, and documents cross them).

It does not prove kernels of other devices, nor sizes: those are the same code.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from dynapipe_ext.batch.document_attention import DOCUMENT_ATTENTION, register_document_attention
from dynapipe_ext.batch.micro_batches import Layout, MicroBatch, SampleLength
from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.errors import ConfigError, DynaPipeError, ExecutionError, in_one_line
from dynapipe_ext.executor.stages.transformers.causal import FLASH_ATTENTION, CausalCut, CausalPart, refuse_headless
from dynapipe_ext.executor.stages.transformers.derived import derived_pattern
from dynapipe_ext.executor.stages.transformers.half_layers import derived_halves
from dynapipe_ext.executor.stages.transformers.part import cut_out
from dynapipe_ext.executor.stages.transformers.quiet import quietly
from dynapipe_ext.executor.stages.transformers.twin import built_twin, token_ids, twin_config
from dynapipe_ext.models.layer_pattern import LayerPattern, ProvenCut
from dynapipe_ext.models.module_tree import meta_model, num_weights
from dynapipe_ext.models.named_models import changing_lengths, rotary_settings, shorten

_ONE_AT_A_TIME = threading.Lock()
_LENGTHS = (5, 8)
_SHORT = 4  # positions of the twin's windows, chunks and rotary lengths
_ACROSS_LIMITS = (3, 13, 5, 6)  # short documents before and behind one that crosses them, at no multiple of _SHORT
_TOLERANCE = 1e-4  # of the largest logit, in float32


@dataclass(frozen=True, slots=True)
class _Subject:
    """A model. Two are equal where the texts of their class and configuration are."""

    whole: Any
    description: str
    config: Any = field(compare=False)


def proven_cut(
    whole: Any,
    config: Any,
    attentions: Sequence[str | None] = (DOCUMENT_ATTENTION, None),
    pattern: LayerPattern | None = None,
) -> ProvenCut:
    """Where models of class `whole` and this configuration are cut, once that is proven; a pattern that is named is
    proven like one that is derived.

    `attentions`: for packed rows, of which the first is taken that keeps documents apart; kernels that need a device
    are held for what document attention is.

    Errors: ConfigError naming what differs where the model is cut or its rows padded.
    """
    tried = tuple(DOCUMENT_ATTENTION if name in FLASH_ATTENTION else name for name in attentions)
    with _ONE_AT_A_TIME:  # ranks may be threads, and torch has one generator for all of them
        return _proven(_Subject(whole, config.to_json_string(use_diff=False), config), tried, pattern)


@lru_cache(maxsize=64)
def _proven(subject: _Subject, attentions: tuple[str | None, ...], pattern: LayerPattern | None) -> ProvenCut:
    whole, config = subject.whole, subject.config
    with quietly():
        try:
            small = twin_config(whole, config)
            twin = built_twin(whole, small)
            refuse_headless(twin)
            named = pattern or derived_pattern(twin)
            CausalCut(named).check(twin)
            named = _proven_stages(twin, named)
            _prove_padding(twin, named)
            cut = _with_packing(twin, small, named, attentions)
            return replace(cut, num_idle_weights=_num_idle_weights(whole, config, named))
        except DynaPipeError:
            raise
        except Exception as error:  # of the model's own code
            raise ConfigError(
                f"{whole.__name__} cannot be cut into stages: its code fails where it is tried ({in_one_line(error)})"
            ) from error


def _num_idle_weights(whole: Any, config: Any, pattern: LayerPattern) -> int:
    """Of the model in its own sizes."""
    if not pattern.idle:
        return 0
    model = meta_model(whole, config)
    return sum(num_weights(model.get_submodule(name)) for name in pattern.idle)


def _proven_stages(twin: Any, pattern: LayerPattern) -> LayerPattern:
    """The pattern with the halves of its layers where a stage may end within each. Errors: ConfigError where a stage
    may not even end between layers."""
    layers = twin.get_submodule(pattern.layers)
    if halves := derived_halves(twin, layers):
        in_halves, each_half = replace(pattern, halves=halves), _stages_of(layers, 0.5)
        try:
            _refuse_weights_everywhere(twin, in_halves, each_half)
            _prove_stages(twin, in_halves, each_half)
        except DynaPipeError:
            pass  # such a family is cut between layers alone
        else:
            return in_halves
    each_layer = _stages_of(layers, 1)
    _refuse_weights_everywhere(twin, pattern, each_layer)
    _prove_stages(twin, pattern, each_layer)
    return pattern


def _refuse_weights_everywhere(twin: Any, pattern: LayerPattern, topology: Topology) -> None:
    """Errors: ConfigError for weights that stages of several ranks would hold, but for those of head and embedding."""
    held: dict[str, int] = {}
    for part in _parts(twin, pattern, topology):
        for name in {*dict(part.model.named_parameters())} - {*part.holders}:
            held[name] = held.get(name, 0) + 1
    if everywhere := sorted(name for name, num_stages in held.items() if num_stages > 1):
        raise ConfigError(
            f"{type(twin).__name__} has weights that several stages would need"
            f" ({', '.join(everywhere[:4])}{', …' if len(everywhere) > 4 else ''}): it cannot be cut into stages"
        )


def _prove_stages(twin: Any, pattern: LayerPattern, topology: Topology, *, layout: Layout = "padded") -> None:
    """Errors: ConfigError where a layer reads what does not come through the one before it, or returns more."""
    micro_batch = MicroBatch(_samples(_LENGTHS), layout)
    whole = _run(_parts(twin, pattern, Topology()), micro_batch)
    name = type(twin).__name__
    try:
        cut = _run(_parts(twin, pattern, topology), micro_batch)
    except DynaPipeError:
        raise
    except Exception as error:  # of the model's own code, which misses what other stages have
        raise ConfigError(
            f"{name} cannot be cut into stages: its forward fails where a stage has only its own layers"
            f" ({in_one_line(error)})"
        ) from error
    for key in whole:
        if key not in cut or not torch.equal(whole[key], cut[key]):
            what = "logits" if key == _LOGITS else f"the gradient of {key}"
            raise ConfigError(
                f"{name} cannot be cut into stages: {what} with a layer a stage differs from that of one stage, as its"
                " layers read more than the hidden states of the one before"
            )
    if more := cut.keys() - whole.keys():
        raise ConfigError(f"{name} cannot be cut into stages: {', '.join(sorted(more))} would train only there")


def _prove_padding(twin: Any, pattern: LayerPattern) -> None:
    """Errors: ConfigError where logits depend on what follows in a row."""
    difference = _difference(twin, pattern, twin, "padded")
    if not difference <= _TOLERANCE:
        raise ConfigError(
            f"{type(twin).__name__} is not causal: logits of rows that are padded behind differ from those of single"
            f" documents by {difference:.2g} of the largest, so batches would change what is learned"
        )


def _with_packing(plain: Any, config: Any, pattern: LayerPattern, attentions: Sequence[str | None]) -> ProvenCut:
    """With the first attention that keeps packed documents apart."""
    text = config.get_text_config()
    fault = ""
    register_document_attention()
    for attention in attentions:
        if attention == DOCUMENT_ATTENTION and getattr(text, "attn_logit_softcapping", None):
            continue  # document attention has no caps
        packs = replace(pattern, packs=True)
        try:
            _prove_packing(plain, config, packs, attention)
        except DynaPipeError as error:
            fault = fault or in_one_line(error)
            continue
        return ProvenCut(pattern=packs, attention=attention)
    return ProvenCut(pattern=replace(pattern, packs=False), packed_fault=fault)


def _prove_packing(plain: Any, config: Any, pattern: LayerPattern, attention: str | None) -> None:
    """Errors: ExecutionError, ConfigError where documents of a row see one another, or the model runs no such rows."""
    name = type(plain).__name__
    try:
        twin = built_twin(type(plain), config, attention) if attention else plain
        _refuse_packing(name, _difference(twin, pattern, plain, "packed"))
        layers = twin.get_submodule(pattern.layers)
        _prove_stages(twin, pattern, _stages_of(layers, 0.5 if pattern.halves else 1), layout="packed")
        for limit, value in changing_lengths(config, longest=_longest(config), row=None).items():
            short = copy.deepcopy(config)
            shorten(short.get_text_config(), limit, _SHORT)
            plain = built_twin(type(plain), short)
            twin = built_twin(type(plain), short, attention) if attention else plain
            difference = _difference(twin, pattern, plain, "packed", _ACROSS_LIMITS)
            _refuse_packing(name, difference, f" where documents exceed its {limit} of {value}")
    except DynaPipeError:
        raise
    except Exception as error:
        raise ExecutionError(f"{name} cannot run packed rows ({in_one_line(error)})") from error


def _refuse_packing(name: str, difference: float, where: str = "") -> None:
    if not difference <= _TOLERANCE:
        raise ExecutionError(
            f"packed logits of {name} differ from those of single documents by {difference:.2g} of the largest{where}"
        )


def _longest(config: Any) -> int | None:
    """Positions above which a stage refuses rows, as rotary frequencies would follow the longest of them."""
    text = config.get_text_config()
    limits = [
        rope.get("original_max_position_embeddings") or text.max_position_embeddings
        for rope in rotary_settings(text)
        if rope.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(limits, default=None)


_LOGITS = "logits"


def _run(parts: Sequence[CausalPart], micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
    """Logits, and gradients by weight, of a forward and backward over all parts, one a stage."""
    x, taken = _tokens(parts[0].model, micro_batch), []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for part in parts:
            if part.place.stage:
                x = x.detach().requires_grad_()
            taken.append(x)
            x = part(x, batch={"model_inputs": part.model_inputs(micro_batch)})
            taken.append(x)
    results = {_LOGITS: x.detach().clone()}
    for part in parts:
        part.model.zero_grad()
    gradient: torch.Tensor | None = torch.linspace(-1.0, 1.0, x.numel()).reshape(x.shape)
    for entered, left in zip(taken[-2::-2], taken[::-2], strict=True):
        torch.autograd.backward(left, gradient)
        gradient = entered.grad
    for part in parts:
        for name, weight in part.model.named_parameters():
            if weight.grad is not None:
                results[name] = weight.grad.clone()
    for part in parts:
        part.model.zero_grad()
    return results


def _difference(
    twin: Any, pattern: LayerPattern, plain: Any, layout: Layout, lengths: Sequence[int] = _LENGTHS
) -> float:
    """Of logits in rows of that layout, by a part, against those of single documents by `plain`, as anybody runs them;
    relative to the largest."""
    micro_batch = MicroBatch(_samples(lengths), layout)
    (part,) = _parts(twin, pattern, Topology())
    twin.eval()
    plain.eval()
    try:
        with torch.no_grad():
            logits = part(_tokens(twin, micro_batch), batch={"model_inputs": part.model_inputs(micro_batch)})
            rows = (
                logits[0].split(list(lengths))
                if layout == "packed"
                else [x[:n] for x, n in zip(logits, lengths, strict=True)]
            )
            alone = [
                plain(input_ids=token_ids(plain, length, seed=seed), use_cache=False).logits[0]
                for seed, length in enumerate(lengths)
            ]
    finally:
        twin.train()
        plain.train()
    largest = max(float(x.abs().max()) for x in alone)
    furthest = max(float((one - other).abs().max()) for one, other in zip(rows, alone, strict=True))
    return furthest / max(largest, 1e-30)


def _samples(lengths: Sequence[int]) -> tuple[SampleLength, ...]:
    return tuple(SampleLength(index, length) for index, length in enumerate(lengths))


def _tokens(model: Any, micro_batch: MicroBatch) -> torch.Tensor:
    """The ids of a micro-batch's samples, by their numbers, in its rows."""
    rows = [token_ids(model, sample.encoder, seed=sample.index)[0] for sample in micro_batch.samples]
    if micro_batch.layout == "packed":
        return torch.cat(rows)[None]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _parts(twin: Any, pattern: LayerPattern, topology: Topology) -> list[CausalPart]:
    cut = CausalCut(pattern)
    parts = [
        cut_out(cut, twin, place) for rank in range(topology.pp) for place in cut.places(twin.config, topology, rank)
    ]
    assert all(isinstance(part, CausalPart) for part in parts)
    return parts  # type: ignore[return-value]


def _stages_of(layers: Any, num_layers: float) -> Topology:
    """As many stages as the layers make, of so many layers each."""
    num_stages = int(len(layers) / num_layers)
    return Topology(pp=num_stages, layers_per_stage=(num_layers,) * num_stages)

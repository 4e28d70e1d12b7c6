"""What a stage holds beside what was measured of its layers and head: parameters, and bytes that it stores once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from dynapipe_ext.batch.topology import Topology
from dynapipe_ext.costs.grid import FloatArray
from dynapipe_ext.costs.layers import LayerKind, encoder_end_stage, first_decoder_stage
from dynapipe_ext.costs.parameters import parameters_per_stage
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.memory import stage_parameters


def parameter_counts(a: Architecture, tp: int) -> dict[str, int]:
    """Parameters on one tensor-parallel rank, under the names that `parameters_by_stage` knows."""

    def of_one_stage(more: int = 0, more_decoder: int = 0) -> int:
        if not a.num_decoder_layers:
            return parameters_per_stage(replace(a, num_layers=1 + more), Topology(tp=tp))[0]
        pair = replace(a, num_layers=1 + more, num_decoder_layers=1 + more_decoder)
        return int(stage_parameters(pair, Topology(tp=tp)).total[0])

    least = of_one_stage()
    layers = {"encoder": of_one_stage(more=1) - least}
    if a.num_decoder_layers:
        layers["decoder"] = of_one_stage(more_decoder=1) - least
    head = a.hidden_size * a.vocab_size // tp
    embedding = head + (a.hidden_size * a.max_seq_len if a.position == "learned" else 0)
    norms = least - sum(layers.values()) - embedding - (0 if a.tied_embeddings else head)
    more: dict[str, int] = {}
    if a.num_decoder_layers:  # each side has a norm and position biases
        more = {"encoder_norm": a.hidden_size, "position_biases": norms // 2 - a.hidden_size}
        norms = a.hidden_size
    ends = {"embedding": embedding, "head": norms, "tied_head": head}
    if not a.tied_embeddings:
        ends |= {"head": norms + head, "tied_head": 0}
    return layers | ends | more


def parameters_by_stage(layers: Sequence[tuple[int, int]], parameters: Mapping[str, float]) -> FloatArray:
    """Of every stage its layers; of the "embedding" one copy on the first stage and one where the decoder begins; where
    known, the "head" on the last stage and, unless an embedding is there, the "tied_head"; the "encoder_norm" where
    the encoder ends; and "position_biases" once for each side that it has layers of.
    """
    end, last = encoder_end_stage(layers), len(layers) - 1
    embeddings = {0, first_decoder_stage(layers) or 0}
    total = [
        num_encoder * parameters["encoder"]
        + (num_decoder * parameters["decoder"] if num_decoder else 0.0)
        + (parameters["embedding"] if stage in embeddings else 0.0)
        + (parameters.get("head", 0.0) if stage == last else 0.0)
        + (parameters.get("tied_head", 0.0) if stage == last and stage not in embeddings else 0.0)
        + (parameters.get("encoder_norm", 0.0) if stage == end else 0.0)
        + parameters.get("position_biases", 0.0) * ((num_encoder > 0) + (num_decoder > 0))
        for stage, (num_encoder, num_decoder) in enumerate(layers)
    ]
    return np.array(total)


def once_bytes(a: Architecture, value_bytes: int, *, shards: int) -> dict[LayerKind, float]:
    """Of each encoder position, on one of the `shards` ranks that share a sequence: what the encoder's final RMSNorm
    keeps (its input and the normalised values, of 16-bit ones in fp32), and its output, which all decoder layers of a
    stage read. Nothing for a decoder-only model, whose final norm is measured with its head.
    """
    if not a.num_decoder_layers:
        return {}
    return {"encoder": 2 * 4 * a.hidden_size / shards, "decoder": value_bytes * a.hidden_size / shards}


def once_by_stage(layers: Sequence[tuple[int, int]], once: Mapping[LayerKind, float]) -> FloatArray:
    """`once["encoder"]` on the stage where the encoder ends, `once["decoder"]` on every stage with decoder layers."""
    end, decoder = encoder_end_stage(layers), once.get("decoder", 0.0)
    held = [once.get("encoder", 0.0) * (stage == end) + decoder * (n > 0) for stage, (_, n) in enumerate(layers)]
    return np.array(held)

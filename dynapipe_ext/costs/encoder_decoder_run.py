"""Costs of an encoder-decoder that trains: counted work at a measured rate, counted bytes, its states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import MicroBatch, Recompute
from dynapipe_ext.batch.topology import DTYPE_OF_WIDTH, ActivationFormat, ReplicaCollectives, Topology
from dynapipe_ext.costs.encoder_decoder import EncoderDecoderCosts
from dynapipe_ext.costs.floor import Floor
from dynapipe_ext.costs.grid import flat_shapes
from dynapipe_ext.costs.layers import first_decoder_stage
from dynapipe_ext.costs.links import Link, Links
from dynapipe_ext.costs.model import IntArray, MicroBatchCosts, ModelFacts, PricesShapes, fingerprint, within_layers
from dynapipe_ext.costs.states import StateRecipe
from dynapipe_ext.costs.tokens import topology_from_json, topology_to_json
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.memory import stage_layers, states


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoderRunCosts:
    """`EncoderDecoderCosts` as a run plans with them; its vocabulary is the padded one.

    `layer_bytes_factor` and `head_bytes_factor` multiply the stored bytes of layers and of the head, as measured. With
    `split_backward` under sequence parallelism a layer keeps what is gathered for its matrix products until W, whole.
    Static bytes are fp32 or Megatron's 16-bit recipe by `param_bytes`, ZeRO stage 1 where `distributed_optimizer`;
    `exact_sums` are those of deterministic mode.
    """

    architecture: Architecture
    topology: Topology
    flops_per_s: float
    layer_overhead_ns: int = 0
    layer_bytes_factor: float = 1.0
    head_bytes_factor: float = 1.0
    bandwidth_bytes_per_s: float = 25e9
    latency_ns: int = 10_000
    activation_bytes_per_value: Literal[2, 4] = 2
    param_bytes: Literal[2, 4] = 2
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    dropout: bool = False
    split_backward: bool = False
    exact_sums: bool = False

    def __post_init__(self) -> None:
        _ = self._counted, self.stage_layers  # refuse what cannot be cut

    @property
    def _counted(self) -> EncoderDecoderCosts:
        return EncoderDecoderCosts(
            architecture=self.architecture,
            topology=self.topology,
            flops_per_s=self.flops_per_s,
            links=Links.uniform(Link(self.latency_ns, self.bandwidth_bytes_per_s)),
            layer_overhead_ns=self.layer_overhead_ns,
            activation_bytes_per_value=self.activation_bytes_per_value,
            sequence_parallel=self.sequence_parallel,
            dropout=self.dropout,
        )

    @property
    def num_stages(self) -> int:
        return self.topology.num_stages

    @property
    def facts(self) -> ModelFacts:
        form = ActivationFormat(
            self.architecture.hidden_size,
            DTYPE_OF_WIDTH[self.activation_bytes_per_value],
            sequence_shards=self.topology.tp if self.sequence_parallel else 1,
            first_decoder_stage=first_decoder_stage(stage_layers(self.architecture, self.topology)),
        )
        return ModelFacts(
            has_decoder=True,
            total_layers=self.architecture.total_layers,
            replica_collectives=ReplicaCollectives.of_zero(int(self.distributed_optimizer)),
            activation_format=form,
        )

    @property
    def stage_layers(self) -> IntArray:
        """(encoder, decoder) layers of every stage, shape (S, 2)."""
        return np.array(stage_layers(self.architecture, self.topology), np.int64)

    def over(self, topology: Topology | None) -> tuple[EncoderDecoderRunCosts, Topology]:
        """The same model, rates and factors over another topology, layers filled in."""
        if topology is None:
            return self, self.topology
        topology = topology.with_layers(self.architecture.total_layers)
        return replace(self, topology=topology), topology

    def recounted(self, change: Callable[[Any], Any]) -> EncoderDecoderRunCosts:
        changed: EncoderDecoderRunCosts = change(self)
        return changed

    def with_exact_sums(self, value_bytes: int) -> EncoderDecoderRunCosts:
        return replace(self, exact_sums=True)

    def floor(self, stage_ranks: tuple[int, ...], *, split: bool, least: PricesShapes | None = None) -> Floor | None:
        """None: attention across the sides is no sum over tokens and squared lengths."""
        return None

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> MicroBatchCosts:
        counted = self._counted
        enc = np.array([m.rows * m.encoder_len for m in micro_batches], np.int64)
        dec = np.array([m.rows * m.decoder_len for m in micro_batches], np.int64)
        recompute = np.array([m.recompute for m in micro_batches], dtype=np.str_)
        return self._in_run(counted.evaluate(within_layers(micro_batches)), enc, dec, recompute)

    def evaluate_shapes(
        self,
        rows: npt.ArrayLike,
        encoder_len: npt.ArrayLike,
        decoder_len: npt.ArrayLike = 0,
        recompute: Recompute = "none",
    ) -> MicroBatchCosts:
        """Costs of padded shapes given as arrays; a shape without a decoder side is INFEASIBLE."""
        r, e, d = flat_shapes(rows, encoder_len, decoder_len)
        counted = self._counted.evaluate_shapes(r, e, d, "none" if recompute == "stage" else recompute)
        costs = self._in_run(counted, r * e, r * d, np.full(r.shape, recompute))
        return costs.refusing(d == 0)

    def head_bytes(self, micro_batches: Sequence[MicroBatch]) -> IntArray:
        """Stored bytes of the last stage's norm, head and logits, shape (M,)."""
        return _scaled(self._counted.head_bytes(micro_batches), self.head_bytes_factor)

    def static_bytes(self) -> IntArray:
        recipe: StateRecipe = "fp32" if self.param_bytes == 4 else "megatron"
        held = states(
            self.architecture,
            self.topology,
            vocab_size=self.architecture.vocab_size,
            recipe=recipe,
            zero_stage=int(self.distributed_optimizer),
            exact_sums=self.exact_sums,
        )
        return held.device.total

    def _in_run(
        self, costs: MicroBatchCosts, enc: IntArray, dec: IntArray, recompute: npt.NDArray[np.str_]
    ) -> MicroBatchCosts:
        is_last = (np.arange(self.num_stages) == self.num_stages - 1)[:, None]
        head = is_last * self._counted.head_bytes_of(dec)
        layers = costs.stored_bytes - head
        num_enc, num_dec = self.stage_layers[:, :1], self.stage_layers[:, 1:]
        values, h, tp = self.activation_bytes_per_value, self.architecture.hidden_size, self.topology.tp
        if self.split_backward and self.sequence_parallel:
            gathered = values * h * (num_enc * 4 * enc + num_dec * (6 * dec + enc))
            layers = layers + np.where(recompute == "full", 0, gathered - gathered // tp)
        return replace(
            costs,
            stored_bytes=_scaled(layers, self.layer_bytes_factor) + _scaled(head, self.head_bytes_factor),
            static_bytes=self.static_bytes(),
        ).keeping_inputs(recompute == "stage")

    def to_json(self) -> dict[str, Any]:
        own = {name: value for name, value in asdict(self).items() if name != "exact_sums" or value}
        return {"kind": "encoder-decoder", **own, "topology": topology_to_json(self.topology)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> EncoderDecoderRunCosts:
        fields = {key: value for key, value in raw.items() if key != "kind"}
        try:
            architecture = Architecture.from_json(fields.pop("architecture"))
            return cls(architecture=architecture, topology=topology_from_json(fields.pop("topology")), **fields)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"encoder-decoder costs cannot be read: {type(error).__name__} {error}") from error

    def fingerprint(self) -> str:
        return fingerprint(self.to_json())


def _scaled(num_bytes: IntArray, factor: float) -> IntArray:
    return num_bytes if factor == 1.0 else np.ceil(num_bytes * factor).astype(np.int64)

"""Costs of an encoder-decoder (T5), counted as `AnalyticCosts` counts decoder-only models: from sizes alone, and as a
run trains it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dynapipe_ext.batch.micro_batches import MicroBatch
from dynapipe_ext.batch.topology import DTYPE_OF_WIDTH, ActivationFormat, ReplicaCollectives, Topology
from dynapipe_ext.batch.vocabulary_parallel import refuse_spread
from dynapipe_ext.costs.analytic import check_bytes_factors, check_rates
from dynapipe_ext.costs.features import Features, split_kinds
from dynapipe_ext.costs.grid import INFEASIBLE
from dynapipe_ext.costs.layers import first_decoder_stage, stage_layers
from dynapipe_ext.costs.links import Link, Links
from dynapipe_ext.costs.model import (
    UNCOUNTED_TAX,
    CostModel,
    IntArray,
    MicroBatchCosts,
    ModelFacts,
    SlicedHead,
    check_tax,
    fingerprint,
    scaled_bytes,
    topology_from_json,
    topology_to_json,
)
from dynapipe_ext.costs.states import StateRecipe, count_states
from dynapipe_ext.errors import ConfigError, check_integer, settle_field_types
from dynapipe_ext.models.architecture import Architecture

# Left out of descriptions, where they are as before costs knew them.
_USUAL = (("exact_sums", False), ("head_slice", 0), ("width_tax", UNCOUNTED_TAX))


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoderCosts(CostModel):
    """Nanoseconds and bytes of micro-batches on every stage of a Megatron T5; encoder layers first, then decoder ones.

    A layer's matrix products take 2 FLOPs a weight and token: q, k, v, output and MLP; a decoder layer's
    cross-attention takes queries and output from decoder tokens, keys and values from encoder tokens. Attention between
    E and D positions takes 4 q E D, nothing skipped: relative position biases rule out kernels that skip or keep less.
    Backward is twice forward, plus what is recomputed.

    Stored bytes as for decoder-only models without flash kernels (Korthikanti et al. 2022, sec. 4): inputs of norms and
    of matrix products, q, k, v, scores, the MLP's inner values; decoder stages hold the encoder's output once. Under
    full recomputation a layer's inputs. Under `dropout` masks, of scores and behind each block, are as wide as values
    (a CPU's operators keep them so), and the scores are kept with and without it. The last stage adds norm and head
    inputs and fp32 logits. Messages carry the encoder's hidden states, after the first decoder layer both sides'.
    `static_bytes` are for the caller to add.
    """

    architecture: Architecture
    topology: Topology
    flops_per_s: float
    links: Links
    layer_overhead_ns: int = 0
    activation_bytes_per_value: Literal[2, 4] = 2
    sequence_parallel: bool = False
    dropout: bool = False
    head_slice: int = 0
    width_tax: float = UNCOUNTED_TAX

    def __post_init__(self) -> None:
        a = self.architecture
        check_tax(self.width_tax)
        if not a.num_decoder_layers:
            raise ConfigError(f"a {a.family} model has no decoder side: count it by AnalyticCosts")
        for name, size in (("num_heads", a.num_heads), ("ffn_hidden_size", a.ffn_hidden_size)):
            if size % self.topology.tp:
                raise ConfigError(f"{name} {size} does not divide over tp {self.topology.tp}: lower tp")
        if self.topology.width not in (allowed := priced_widths(a, self.topology)):
            raise ConfigError(
                f"width {self.topology.width} does not divide the {a.num_heads // self.topology.tp} heads of a tensor"
                " parallel rank, and keys of two sides are not gathered: take one of"
                f" {', '.join(map(str, allowed))}"
            )

    @property
    def num_stages(self) -> int:
        return self.topology.num_stages

    @property
    def stage_layers(self) -> IntArray:
        """(encoder, decoder) layers of every stage, shape (S, 2)."""
        return np.array(stage_layers(self.architecture, self.topology), np.int64)

    def price(self, features: Features) -> MicroBatchCosts:
        return self._price(features.positions, features.recompute)

    def _price(self, sizes: IntArray, recompute: npt.NDArray[np.str_]) -> MicroBatchCosts:
        a, tp, values = self.architecture, self.topology.tp, self.activation_bytes_per_value
        h, q = a.hidden_size, a.query_size
        whole_enc, whole_dec, *scores = sizes
        width = self.topology.width
        enc, dec, enc2, dec2, cross2 = -(-sizes // width)  # of one rank
        recompute, is_sliced = split_kinds(recompute)
        is_sliced = self.sliced_head.of(is_sliced, dec)
        full, selective = recompute == "full", recompute == "selective"
        layers = self.stage_layers
        num_enc, num_dec = layers[:, :1], layers[:, 1:]
        is_last = (np.arange(self.num_stages) == self.num_stages - 1)[:, None]
        fc1 = a.fc1_size

        dense = 2 * (4 * h * q + h * (fc1 + a.ffn_hidden_size)) // tp
        matmul = num_enc * (dense * whole_enc)
        matmul = matmul + num_dec * (dense * whole_dec + 4 * h * q // tp * (whole_dec + whole_enc))
        attention = 4 * q // tp * (num_enc * scores[0] + num_dec * (scores[1] + scores[2]))
        head = is_last * (2 * a.vocab_size * h // tp * whole_dec)
        forward = matmul + attention + head
        again = np.where(full, matmul, 0) + np.where(full | selective, attention, 0) + is_sliced * head

        logits = a.vocab_size // tp * dec
        enc_whole, enc_kept = self._kept(enc, enc2, full, selective, values * h * enc)
        cross_scores = self._bytes_per_score * a.num_heads // tp * cross2
        cross_rest = self._split((2 + self.dropout) * values * h * dec) + values * q // tp * (2 * dec + 2 * enc)
        dec_whole, dec_kept = self._kept(dec, dec2, full, selective, values * h * dec)
        dec_whole = dec_whole + cross_rest + cross_scores
        dec_kept = dec_kept + np.where(full, 0, cross_rest + np.where(selective, 0, cross_scores))
        stored = num_enc * enc_kept + num_dec * dec_kept + (num_dec > 0) * self._split(values * h * enc)
        head_bytes = self.head_bytes_of(dec, is_sliced)
        head_working = np.where(is_sliced, self.sliced_head.working_bytes(dec), values * logits)
        working = np.maximum(
            (num_enc > 0) * (enc_whole - enc_kept + values * max(fc1 // tp, h) * enc),
            (num_dec > 0) * (dec_whole - dec_kept + values * max(fc1 // tp, h) * dec),
        )
        decoding = (np.cumsum(num_dec) > 0)[:-1, None]
        sent = self._split(values * h * enc) + decoding * self._split(values * h * dec)
        sent = sent * np.ones((self.num_stages - 1, 1), np.int64)
        overhead_ns = (num_enc + num_dec) * self.layer_overhead_ns
        return MicroBatchCosts(
            forward_ns=overhead_ns + self._ns(forward, taxed=True),
            backward_ns=overhead_ns + self._ns(2 * forward + again, taxed=True),
            weight_ns=self._ns(np.where(full, 0, matmul + ~is_sliced * head)),
            stored_bytes=stored + is_last * head_bytes,
            working_bytes=np.maximum(working, is_last * head_working),
            transfer_ns=self.links.transfer_ns(self.topology, sent),
            transfer_bytes=sent,
            static_bytes=np.zeros(self.num_stages, np.int64),
        ).keeping_inputs(recompute == "stage")

    @property
    def sliced_head(self) -> SlicedHead:
        return SlicedHead(
            slice_len=self.head_slice,
            hidden_size=self.architecture.hidden_size,
            columns=self.architecture.vocab_size // self.topology.tp,
            value_bytes=self.activation_bytes_per_value,
            divided=self.sequence_parallel,
        )

    def head_bytes_of(self, dec: IntArray, is_sliced: npt.NDArray[np.bool_] | bool = False) -> IntArray:
        """Stored bytes of the last stage's norm, head and logits, for so many decoder positions."""
        a, values = self.architecture, self.activation_bytes_per_value
        logits = 4 * (a.vocab_size // self.topology.tp) * dec
        logits_bytes = np.where(is_sliced, self.sliced_head.kept_bytes(dec), logits)
        kept_bytes: IntArray = 2 * self._split(values * a.hidden_size * dec) + logits_bytes
        return kept_bytes

    def in_slices(self, recompute: npt.NDArray[np.str_], dec: IntArray) -> npt.NDArray[np.bool_]:
        """Which micro-batches of so many decoder positions have their head in slices."""
        return self.sliced_head.of(split_kinds(recompute)[1], dec)

    def head_bytes(self, micro_batches: Sequence[MicroBatch]) -> IntArray:
        """Stored bytes of the last stage's norm, head and logits, shape (M,)."""
        width = self.topology.width
        kept_positions = (
            0 if m.layer_recompute == "stage" else -(-m.rows * m.decoder_len // width) for m in micro_batches
        )
        dec, kinds = np.fromiter(kept_positions, np.int64), np.array([m.recompute for m in micro_batches], np.str_)
        return self.head_bytes_of(dec, self.in_slices(kinds, dec))

    def _kept(
        self,
        tokens: IntArray,
        squares: IntArray,
        full: npt.NDArray[np.bool_],
        selective: npt.NDArray[np.bool_],
        inputs: IntArray,
    ) -> tuple[IntArray, IntArray]:
        """Of a layer with self-attention and MLP: everything, and what is left under each kind of recomputation."""
        a, tp, values = self.architecture, self.topology.tp, self.activation_bytes_per_value
        fc1 = a.fc1_size
        scores = self._bytes_per_score * a.num_heads // tp * squares
        rest = self._split((4 + 2 * self.dropout) * values * a.hidden_size * tokens)
        rest = rest + values * (4 * a.query_size + fc1 + a.ffn_hidden_size) // tp * tokens
        kept_bytes = np.where(full, self._split(inputs), rest + np.where(selective, 0, scores))
        return rest + scores, kept_bytes

    @property
    def _bytes_per_score(self) -> int:
        """The softmax, and with dropout its mask and its output."""
        return self.activation_bytes_per_value * (3 if self.dropout else 1)

    def _ns(self, flops: IntArray, *, taxed: bool = False) -> IntArray:
        """Of FLOPs that the ranks of a block divide; `taxed`, with what they exchange."""
        flop_ns, width = 1e9 / self.flops_per_s, self.topology.width
        if width > 1:
            flop_ns *= (1 + self.width_tax * taxed) / width
        time_ns: IntArray = np.rint(flops * flop_ns).astype(np.int64)
        return time_ns

    def _split(self, num_bytes: IntArray) -> IntArray:
        return -(-num_bytes // self.topology.tp) if self.sequence_parallel else num_bytes

    def to_json(self) -> dict[str, Any]:
        described = {"architecture": self.architecture.to_json(), "topology": topology_to_json(self.topology)}
        own = without_usual(asdict(self))
        return {"kind": "encoder-decoder", **own, **described}

    def fingerprint(self) -> str:
        return fingerprint(self.to_json())


def without_usual(settings: Mapping[str, Any]) -> dict[str, Any]:
    return dict(item for item in settings.items() if item not in _USUAL)


def priced_widths(architecture: Architecture, topology: Topology) -> tuple[int, ...]:
    """Those that divide the heads of a tensor parallel rank."""
    heads = max(1, architecture.num_heads // topology.tp)
    return tuple(1 << power for power in range((heads & -heads).bit_length()))


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoderRunCosts(CostModel):
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
    head_slice: int = 0
    width_tax: float = UNCOUNTED_TAX

    def __post_init__(self) -> None:
        settle_field_types(self)
        check_bytes_factors(self)
        check_rates(self)
        check_integer("latency_ns", self.latency_ns, least=0, most=INFEASIBLE)
        check_integer("layer_overhead_ns", self.layer_overhead_ns, least=0, most=INFEASIBLE)
        refuse_spread(self.topology, "a model with a decoder side")
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
            head_slice=self.head_slice,
            width_tax=self.width_tax,
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
            slices_head=self.head_slice > 0,
            width=self.topology.width,
            priced_widths=priced_widths(self.architecture, self.topology),
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

    def at_width(self, width: int) -> EncoderDecoderRunCosts:
        """Errors: ConfigError for a width that does not divide the heads."""
        return replace(self, topology=self.topology.at_width(width))

    def recounted(self, change: Callable[[Any], Any]) -> EncoderDecoderRunCosts:
        changed: EncoderDecoderRunCosts = change(self)
        return changed

    def with_exact_sums(self, value_bytes: int) -> EncoderDecoderRunCosts:
        return replace(self, exact_sums=True)

    def price(self, features: Features) -> MicroBatchCosts:
        """Price micro-batches; a shape without a decoder side is INFEASIBLE."""
        (enc, dec, *_), recompute = features.positions, features.recompute
        layers, is_sliced = split_kinds(recompute)
        within = np.where(is_sliced & (layers == "stage"), "head", np.where(layers == "stage", "none", recompute))
        costs = self._in_run(self._counted._price(features.positions, within), enc, dec, recompute)
        return costs if features.padded_shapes is None else costs.refusing(dec == 0)

    def head_bytes(self, micro_batches: Sequence[MicroBatch]) -> IntArray:
        """Stored bytes of the last stage's norm, head and logits, shape (M,)."""
        return scaled_bytes(self._counted.head_bytes(micro_batches), self.head_bytes_factor)

    def static_bytes(self) -> IntArray:
        recipe: StateRecipe = "fp32" if self.param_bytes == 4 else "megatron"
        zero_stage = int(self.distributed_optimizer)
        held = count_states(self.architecture, self.topology, recipe, zero_stage=zero_stage, exact_sums=self.exact_sums)
        return held.device.total

    def _in_run(
        self, costs: MicroBatchCosts, enc: IntArray, dec: IntArray, recompute: npt.NDArray[np.str_]
    ) -> MicroBatchCosts:
        enc, dec = -(-enc // self.topology.width), -(-dec // self.topology.width)  # of one rank
        is_last = (np.arange(self.num_stages) == self.num_stages - 1)[:, None]
        head = is_last * self._counted.head_bytes_of(dec, self._counted.in_slices(recompute, dec))
        recompute, _ = split_kinds(recompute)
        layers = costs.stored_bytes - head
        num_enc, num_dec = self.stage_layers[:, :1], self.stage_layers[:, 1:]
        values, h, tp = self.activation_bytes_per_value, self.architecture.hidden_size, self.topology.tp
        if self.split_backward and self.sequence_parallel:
            gathered = values * h * (num_enc * 4 * enc + num_dec * (6 * dec + enc))
            layers = layers + np.where(recompute == "full", 0, gathered - gathered // tp)
        return replace(
            costs,
            stored_bytes=scaled_bytes(layers, self.layer_bytes_factor) + scaled_bytes(head, self.head_bytes_factor),
            static_bytes=self.static_bytes(),
        ).keeping_inputs(recompute == "stage")

    def to_json(self) -> dict[str, Any]:
        own = without_usual(asdict(self))
        return {"kind": "encoder-decoder", **own, "topology": topology_to_json(self.topology)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> EncoderDecoderRunCosts:
        fields = {key: value for key, value in raw.items() if key != "kind"}
        try:
            architecture = Architecture.from_json(fields.pop("architecture"))
            return cls(architecture=architecture, topology=topology_from_json(fields.pop("topology")), **fields)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"encoder-decoder costs cannot be read: {type(error).__name__} {error}") from error

"""Costs as a polynomial in tokens: a tiny deterministic model for tests, trials and the emulated stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np

from dynapipe_ext.batch.micro_batches import make_length_error
from dynapipe_ext.batch.topology import ActivationFormat, list_cp_degrees
from dynapipe_ext.costs.codec import dump_fields, from_json
from dynapipe_ext.costs.features import Features, split_kinds
from dynapipe_ext.costs.floor import GrowingTimes
from dynapipe_ext.costs.model import (
    UNCOUNTED_TAX,
    CostCapabilities,
    CostModel,
    MicroBatchCosts,
    check_numbers,
    make_growing_times,
)
from dynapipe_ext.errors import ConfigError, short

_MOST = 1 << 60
_MOST_A_TOKEN = 1 << 31  # so that the longest sample stays within 64 bits


@dataclass(frozen=True, slots=True)
class TokenCosts(CostModel):
    """Costs by a polynomial in tokens: F = overhead + ns_per_token x tokens + ns_per_token_squared x sum(length^2) on
    each stage, B = backward_ratio x F. W is half of the part of B that tokens take.

    Padding counts as tokens. `stage_scale` (a factor per stage) makes stages unequal. Recomputation "full" adds one F
    to B and stores a tenth; "selective" adds the squared part and stores half; "stage" adds one F and stores only the
    stage's input.

    Each of `width` ranks has its share of tokens and squares; exchanges take `width_tax` of that work on top.

    Without an overhead, plans would be of single samples. The default is the time of 100 tokens. Two samples are joined
    if together they take at most a quarter more than the longer one: equal ones up to 1/3 of the overhead, 33
    tokens."""

    LATER_FIELDS: ClassVar = ("width", "width_tax")  # older files do not have them (`codec.py`)
    num_stages: int
    ns_per_token: int = 1000
    ns_per_token_squared: float = 0
    backward_ratio: float = 2.0
    bytes_per_token: int = 1000
    static_bytes: int = 0
    overhead_ns: int = 100_000
    transfer_ns_per_token: int = 0
    transfer_bytes_per_token: int = 0
    stage_scale: tuple[float, ...] = ()
    width: int = 1
    width_tax: float = UNCOUNTED_TAX

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
            is_listed = one.name == "stage_scale" and isinstance(value, list)
            object.__setattr__(self, one.name, tuple(value) if is_listed else value)
        if type(self.num_stages) is not int or self.num_stages < 1:
            raise ConfigError(f"num_stages is {short(self.num_stages)} but must be an integer of at least 1")
        for name, value in asdict(self).items():
            most = _MOST_A_TOKEN if "per_token" in name else _MOST
            for one in value if isinstance(value, tuple) else (value,):
                if not isinstance(one, int | float | np.integer) or not 0 <= one <= most:
                    raise ConfigError(f"{name} is {short(one)} but costs are numbers of 0 to {most:,}: give one")
        check_numbers(self, width_tax=(0, 100))
        if self.width not in list_cp_degrees(self.width):
            raise ConfigError(f"width is {self.width} but must be a power of two: give one such as 1")
        if self.stage_scale and len(self.stage_scale) != self.num_stages:
            raise ConfigError(f"stage_scale has {len(self.stage_scale)} entries for {self.num_stages} stages")

    @property
    def facts(self) -> CostCapabilities:
        """Pieces have prices: `bytes_per_token` includes their keys and values. Messages hold 2-byte values of both
        sides of a sample; their format is unknown if `transfer_bytes_per_token` is 0 or odd."""
        hidden_size, odd = divmod(self.transfer_bytes_per_token, 2)
        is_whole = hidden_size and not odd
        form = ActivationFormat(hidden_size, "bfloat16", first_decoder_stage=0) if is_whole else None
        return CostCapabilities(activation_format=form, prices_pieces=True, width=self.width)

    def get_floor(self, stage_ranks: tuple[int, ...], *, split: bool, least: CostModel | None = None) -> GrowingTimes:
        return make_growing_times(least or self, split=split)

    def at_width(self, width: int) -> TokenCosts:
        return replace(self, width=width)

    def price(self, features: Features) -> MicroBatchCosts:
        recompute, _ = split_kinds(features.recompute)  # there is no head
        tokens, squares = features.tokens, features.squares
        full, selective = recompute == "full", recompute == "selective"
        scale = np.array(self.stage_scale or (1.0,) * self.num_stages)[:, None]
        if self.width > 1:
            scale = scale * ((1 + self.width_tax) / self.width)
        linear = np.rint(scale * (self.ns_per_token * tokens)).astype(np.int64)
        if scale.max() * self.ns_per_token_squared * float(squares.max(initial=0)) > _MOST:
            raise make_length_error(int(tokens.max()))
        attention = np.rint(scale * (self.ns_per_token_squared * squares)).astype(np.int64)
        tokens = -(-tokens // self.width)  # of a rank's slice
        forward = self.overhead_ns + linear + attention
        again = np.where(full, forward, np.where(selective, attention, 0))
        backward = np.rint(self.backward_ratio * forward).astype(np.int64) + again
        weight = np.rint(self.backward_ratio * linear / 2).astype(np.int64)
        whole = np.broadcast_to(self.bytes_per_token * tokens, forward.shape)
        stored = np.where(full, whole // 10, np.where(selective, whole // 2, whole))
        edges = np.ones((self.num_stages - 1, 1), np.int64)
        return MicroBatchCosts(
            forward_ns=forward,
            backward_ns=backward,
            weight_ns=weight,
            stored_bytes=stored,
            working_bytes=whole - stored,
            transfer_ns=edges * (self.transfer_ns_per_token * tokens),
            transfer_bytes=edges * (self.transfer_bytes_per_token * tokens),
            static_bytes=np.full(self.num_stages, self.static_bytes, np.int64),
        ).keep_inputs(recompute == "stage")

    def to_json(self) -> dict[str, Any]:
        return {"kind": "tokens", **dump_fields(self)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> TokenCosts:
        """Return the costs that `to_json` wrote. Raises ConfigError for other content."""
        try:
            return from_json(cls, {name: value for name, value in raw.items() if name != "kind"})
        except TypeError as error:
            raise ConfigError(f"token costs {sorted(raw)} cannot be read: {error}") from error

"""Where a causal model of transformers is cut into stages: the names of its modules, and what was proven of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from dynapipe_ext.errors import ConfigError, reason, refuse_unknown, short
from dynapipe_ext.toml_text import parse_toml

# Positions of a row, whole or full of samples, whose stored bytes are measured; under masks of rows no more are packed.
MASKED_ROW = 2048
Half = Literal["attention", "mlp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfModule:
    """A module within a layer, by its name there, that one half of the layer runs. `num_tupled`: values of the tuple
    that it returns, of which the first is hidden states; 0: these alone."""

    name: str
    half: Half
    num_tupled: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPattern:
    """The modules of a family of causal models, by their names within the model.

    `layers` is the list of decoder layers. Each takes hidden states (rows, length, hidden) and returns them, or a tuple
    that begins with them (`returns_tuple`), of `num_returned` values. Only the first stage needs the modules in
    `first`, only the last those in `last`. No text runs through those in `idle`, such as the tower of images: the first
    stage keeps them as they are. Every stage has a copy of all others, such as rotary embeddings, which have no
    weights. `packs`: documents packed into a row do not see one another; `check_packing` proves it of a model.
    `halves`: what layers run before and behind the place where a stage may end within one; empty if there is none.

    >>> LayerPattern(layers="model.layers", first=("model.embed_tokens",), last=("model.norm", "lm_head")).body
    'model'
    """

    layers: str
    first: tuple[str, ...]
    last: tuple[str, ...]
    returns_tuple: bool = False
    num_returned: int = 1
    idle: tuple[str, ...] = ()
    packs: bool = False
    halves: tuple[HalfModule, ...] = ()

    @property
    def body(self) -> str:
        """The module whose forward runs the layers, without the head."""
        return self.layers.rpartition(".")[0]

    @property
    def num_tupled(self) -> int:
        """Values of the tuple that a layer returns, 0 where it returns no tuple."""
        return self.num_returned if self.returns_tuple else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenCut:
    """A pattern that was proven. `attention` is the attn_implementation of packed rows, None the model's own;
    `packed_fault` says why rows cannot be packed, empty where they can. `num_idle_weights` are in what no text runs
    through."""

    pattern: LayerPattern
    attention: str | None = None
    packed_fault: str = ""
    num_idle_weights: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ProvenCut:
        return cls(**{**raw, "pattern": pattern_from_json(raw["pattern"], "the settled cut")})


def read_pattern(path: str | Path) -> LayerPattern:
    """The pattern in a file of TOML, or of JSON by its name: the fields of `LayerPattern`, but for what a proof says.

    Errors: ConfigError naming the file, and a field that is unknown, missing or of the wrong type.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        raw = json.loads(text) if path.suffix == ".json" else parse_toml(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as a layer pattern: {reason(error)}: give TOML, or .json") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must be an object with layers, first and last, but is {short(raw)}")
    for name in ("packs", "halves"):
        if name in raw:
            raise ConfigError(f"{path}: {name} is proven when a run starts: leave it out")
    return pattern_from_json(raw, str(path))


def pattern_from_json(raw: Mapping[str, Any], where: str) -> LayerPattern:
    """Errors: ConfigError naming `where` and the field."""
    kinds: dict[str, Any] = {"layers": str, "returns_tuple": bool, "num_returned": int, "packs": bool}
    refuse_unknown(raw, [field.name for field in fields(LayerPattern)], where)
    if missing := [name for name in ("layers", "first", "last") if name not in raw]:
        raise ConfigError(f"{where}: lacks {', '.join(missing)}: name the modules of the model, as {_EXAMPLE}")
    values = dict(raw)
    for name, value in raw.items():
        if name == "halves":  # of a proven cut, not of a file
            values[name] = tuple(HalfModule(**module) for module in value)
        elif name not in kinds:  # names of modules
            if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
                raise ConfigError(f"{where}: {name} is {short(value)} but must be a list of modules' names")
            values[name] = tuple(value)
        elif type(value) is not kinds[name]:
            raise ConfigError(f"{where}: {name} is {short(value)} but must be of type {kinds[name].__name__}")
    return LayerPattern(**values)


_EXAMPLE = 'layers = "model.layers", first = ["model.embed_tokens"], last = ["model.norm", "lm_head"]'

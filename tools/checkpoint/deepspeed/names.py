"""Where the tensors of a published model lie in the module that a DeepSpeed engine holds.

The engine holds transformers' modules. Their names are those on the Hub, but transformers 5 keeps the experts of a
layer as one tensor. A state dict has tied weights under each of their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dynapipe_ext.errors import DataError
from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.families import published_form
from dynapipe_ext.models.tensors import TensorGroup, tensor_groups
from dynapipe_ext.tools.checkpoint.deepspeed.contents import DeepSpeedContents
from dynapipe_ext.tools.checkpoint.deepspeed.file import SplitTensor, same_bytes
from dynapipe_ext.tools.checkpoint.files.stored_tensor import refuse_faults

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_ROTARY = r"(?:.*\.)?rot\w*\.(?:inv_freq|original_inv_freq|cos_cached|sin_cached)"
_BUFFER = re.compile(_ROTARY + r"|.*\.attn\.(?:bias|masked_bias)")
_ADVICE = "Correct config.json, or give the files that belong to the model"


@dataclass(frozen=True, slots=True)
class ModulePlace:
    """A tensor of the Hub as a part of the module's tensor `name`: row-major, from value `start` on."""

    name: str
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModuleTensor:
    """A parameter of transformers' module; its values are those of `parts` (group, name on the Hub) end to end."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[TensorGroup, str], ...]

    @property
    def groups(self) -> tuple[TensorGroup, ...]:
        """Each group once, in order."""
        return tuple(dict.fromkeys(group for group, _ in self.parts))


def tied_names(architecture: Architecture) -> tuple[str, ...]:
    """Names under which a state dict holds the embedding once more."""
    head = f"{published_form(architecture).names.head}.weight"
    names: tuple[str, ...] = (head,) if architecture.tied_embeddings else ()
    if architecture.num_decoder_layers:
        names += ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    return names


def module_tensors(architecture: Architecture) -> tuple[ModuleTensor, ...]:
    """Every parameter as transformers 5 names it, in the order of the Hub's groups; tied ones once."""
    by_name: dict[str, ModuleTensor] = {}
    for group in tensor_groups(architecture):
        for info in group.tensors:
            name, _, whole = _in_module(architecture, group, info.name, info.shape)
            parts = by_name[name].parts if name in by_name else ()
            by_name[name] = ModuleTensor(name, whole, (*parts, (group, info.name)))
    return tuple(by_name.values())


def _in_module(
    a: Architecture, group: TensorGroup, name: str, shape: tuple[int, ...]
) -> tuple[str, int, tuple[int, ...]]:
    """Name in transformers 5's module, first value, shape of the whole tensor there."""
    if group.kind == "router":
        return name.replace(".block_sparse_moe.", ".mlp."), 0, shape
    if group.expert < 0:
        return name, 0, shape
    experts = name.partition(".experts.")[0].replace(".block_sparse_moe", ".mlp") + ".experts"
    rows, columns = shape
    if group.kind == "mlp_out":
        return f"{experts}.down_proj", group.expert * rows * columns, (a.num_experts, rows, columns)
    half = [info.name for info in group.tensors].index(name)
    whole = (a.num_experts, 2 * rows, columns)
    return f"{experts}.gate_up_proj", (2 * group.expert + half) * rows * columns, whole


def canonical(contents: DeepSpeedContents) -> DeepSpeedContents:
    """`contents` with names as transformers has them: without the wrappers of engines and compilers."""
    names = {*contents.weights, *contents.aliases, *(name for kind in contents.states.values() for name in kind)}
    short = {name: _WRAPPERS.sub("", name) for name in names}
    if len(set(short.values())) != len(short):  # a module that is itself called "module"
        return contents
    return DeepSpeedContents(
        weights={short[name]: stored for name, stored in contents.weights.items()},
        casts={short[name]: dtype for name, dtype in contents.casts.items()},
        states={kind: {short[name]: t for name, t in by_name.items()} for kind, by_name in contents.states.items()},
        aliases={short[name]: short.get(other, other) for name, other in contents.aliases.items()},
        training=contents.training,
        notices=contents.notices,
    )


def is_buffer(name: str) -> bool:
    """Whether a name is of what transformers computes anew: rotary frequencies, causal masks."""
    return _BUFFER.fullmatch(name) is not None


class ModulePlaces:
    """Where each tensor of the Hub lies in `contents`. Finding them reads nothing but, to compare, tied copies."""

    def __init__(self, architecture: Architecture, contents: DeepSpeedContents) -> None:
        self.architecture = architecture
        self.contents = contents
        self._found: dict[str, ModulePlace] = {}
        used: set[str] = set()
        self._shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # misshapen: expected, actual
        self._missing: list[tuple[str, tuple[int, ...]]] = []
        for group in tensor_groups(architecture):
            for info in group.tensors:
                for name, start, whole in self._candidates(group, info.name, info.shape):
                    stored = self._stored(name)
                    if stored is None:
                        continue
                    used |= {name, contents.aliases.get(name, name)}
                    if stored.shape != whole:
                        self._shapes[name] = whole, stored.shape
                    self._found[info.name] = ModulePlace(name, start, info.shape)
                    break
                else:
                    self._missing.append((info.name, info.shape))
        self._left = [name for name in contents.weights if name not in used]

    def _candidates(
        self, group: TensorGroup, name: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, int, tuple[int, ...]]]:
        yield name, 0, shape
        yield _in_module(self.architecture, group, name, shape)
        for base in ("model.", "transformer."):  # the module below the head alone
            if name.startswith(base):
                yield name.removeprefix(base), 0, shape
        if group.kind == "embedding":  # ZeRO names a tied weight by whichever module comes first
            for tied in tied_names(self.architecture):
                yield tied, 0, shape

    def _stored(self, name: str) -> SplitTensor | None:
        weights = self.contents.weights
        return weights.get(name) or weights.get(self.contents.aliases.get(name, ""))

    def __getitem__(self, name: str) -> ModulePlace:
        if name not in self._found:
            raise DataError(f"the checkpoint has no tensor {name}: give the files that belong to the model")
        return self._found[name]

    def items(self) -> Iterable[tuple[str, ModulePlace]]:
        return self._found.items()

    def buffers(self) -> list[str]:
        """What is no weight and is left out."""
        return [name for name in self._left if is_buffer(name)]

    def check(self, where: Path) -> None:
        """Errors: DataError that names every missing, extra, misshapen or wrongly tied tensor."""
        faults = [f"{name} {list(shape)} is missing" for name, shape in self._missing]
        tied = tied_names(self.architecture)
        embedding = tensor_groups(self.architecture)[0].tensors[0].name
        for name in self._left:
            if is_buffer(name):
                continue
            stored = self.contents.weights[name]
            own = self._stored(self._found[embedding].name) if embedding in self._found else None
            if name not in tied or own is None:
                faults.append(f"{name} {list(stored.shape)} is extra")
            elif not same_bytes(stored, own):
                faults.append(f"{name} differs from {embedding}, which config.json ties to it")
        faults += [f"{name} is {list(actual)}, not {list(whole)}" for name, (whole, actual) in self._shapes.items()]
        refuse_faults(where, faults, _ADVICE)

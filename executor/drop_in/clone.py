"""Whether a clone of Megatron-LM has the functions that the drop-in replaces and calls; read, not run."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from dynapipe_ext.errors import ConfigError

_SCHEDULES = "megatron/core/pipeline_parallel/schedules.py"
_TRAINING = "megatron/training/training.py"
# Keywords of the function that stands in the place of Megatron's schedules (`ForwardBackward.__call__`).
STEP_KEYWORDS = frozenset(
    (
        "forward_step_func",
        "data_iterator",
        "model",
        "num_microbatches",
        "seq_length",
        "micro_batch_size",
        "decoder_seq_length",
        "forward_only",
        "collect_non_loss_data",
        "first_val_step",
        "adjust_tensor_shapes_fn",
        "p2p_communicator",
        "pg_collection",
        "force_all_reduce",
    )
)


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """A function of Megatron-LM, and the parameters that this package relies on.

    Where this package replaces the function, Megatron may call it with any of its parameters: it must have no others.
    Where this package calls the function, it must have all of these, and others only with defaults. Where it hands on
    what the function is called with (`wrapped`), it must have all of these.
    """

    file: str
    name: str
    parameters: frozenset[str] = frozenset()
    replaced: bool = False
    wrapped: bool = False

    def misfit(self, actual: ast.arguments) -> str:
        """How the parameters in the clone's source differ from what is needed; empty where they fit."""
        names, required = _parameters(actual)
        if self.replaced:
            others, missing = names - self.parameters, frozenset[str]()
        else:
            others = frozenset[str]() if self.wrapped else required - self.parameters
            missing = self.parameters - names
        faults = {"takes": others, "does not take": missing}
        return ", ".join(f"{verb} {' and '.join(sorted(names))}" for verb, names in faults.items() if names)


def _named(*names: str) -> frozenset[str]:
    return frozenset(names)


ENTRY_POINTS = (
    EntryPoint(
        _SCHEDULES, "get_forward_backward_func", _named("pp_size", "vp_size", "schedule_pg_collection"), replaced=True
    ),
    EntryPoint(_SCHEDULES, "forward_backward_no_pipelining", STEP_KEYWORDS, replaced=True),
    EntryPoint(_SCHEDULES, "forward_backward_pipelining_without_interleaving", STEP_KEYWORDS, replaced=True),
    EntryPoint(_SCHEDULES, "forward_backward_pipelining_with_interleaving", STEP_KEYWORDS, replaced=True),
    EntryPoint(
        _SCHEDULES,
        "forward_step",
        _named("forward_step_func", "data_iterator", "model", "num_microbatches", "input_tensor", "forward_data_store")
        | _named("config", "cp_group_size", "collect_non_loss_data", "is_first_microbatch", "current_microbatch")
        | _named("vp_stage", "is_last_stage"),
    ),
    EntryPoint("megatron/training/arguments.py", "parse_args", _named("extra_args_provider")),
    EntryPoint("megatron/training/global_vars.py", "set_args", _named("args")),
    EntryPoint(
        _TRAINING,
        "build_train_valid_test_data_iterators",
        _named("build_train_valid_test_datasets_provider"),
        replaced=True,
    ),
    EntryPoint(_TRAINING, "get_model", _named("model_provider_func")),
    EntryPoint(_TRAINING, "num_floating_point_operations", _named("args", "batch_size")),
    EntryPoint(_TRAINING, "get_train_valid_test_num_samples"),
    EntryPoint(_TRAINING, "training_log", _named("iteration"), wrapped=True),
)


def clone_version(clone: Path) -> tuple[int, int, int]:
    """The version of its megatron-core. Errors: ConfigError for a folder that is no clone."""
    place = clone / "megatron" / "core" / "package_info.py"
    values = {
        target.id: node.value.value
        for node in _parsed(place).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    try:
        return values["MAJOR"], values["MINOR"], values["PATCH"]  # type: ignore[return-value]
    except KeyError as error:
        raise ConfigError(f"{place} does not say {error.args[0]}: give a clone of Megatron-LM at a release") from None


def misfits(clone: Path) -> list[str]:
    """How the clone's functions differ from what planned schedules need; empty where they fit. Errors: ConfigError."""
    functions = {
        file: {node.name: node.args for node in _parsed(clone / file).body if isinstance(node, ast.FunctionDef)}
        for file in sorted({entry.file for entry in ENTRY_POINTS})
    }
    faults = []
    for entry in ENTRY_POINTS:
        arguments = functions[entry.file].get(entry.name)
        misfit = "is not there" if arguments is None else entry.misfit(arguments)
        if misfit:
            faults.append(f"{entry.name} of {entry.file} {misfit}")
    return faults


def _parsed(place: Path) -> ast.Module:
    try:
        return ast.parse(place.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{place} cannot be read ({error.strerror}): give the root of a clone of Megatron-LM"
        ) from error
    except SyntaxError as error:
        raise ConfigError(f"{place} is no Python that this interpreter reads: {error}") from error


def _parameters(arguments: ast.arguments) -> tuple[frozenset[str], frozenset[str]]:
    """All by name, and those without a default."""
    positional = [*arguments.posonlyargs, *arguments.args]
    with_default = positional[len(positional) - len(arguments.defaults) :] + [
        one for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is not None
    ]
    names = frozenset(one.arg for one in (*positional, *arguments.kwonlyargs))
    return names, names - {one.arg for one in with_default}

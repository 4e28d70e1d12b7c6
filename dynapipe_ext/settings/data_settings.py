"""The settings of a run's data: what it trains on, and what it is evaluated on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dynapipe_ext.data.mixture import weighted_files
from dynapipe_ext.errors import ConfigError

TemplateChoice = Literal["auto", "chat", "prompt", "text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """`path` empty means the built-in generator. `mixture` names several files instead, all with weights, as
    "a.jsonl=0.7", or none: the shares of the samples that training sees. `tokenizer`: "bpe" (trained on the data,
    `vocab_size` ids), "bytes", or what `dynapipe preprocess --tokenizer` takes. Of a model's folder of transformers the
    tokenizer does what that model was trained with: `template` says of what the records are ("auto": what the first one
    has), the keys name their fields where these are not input and target, prompt and response, or text; `text_key`
    alone reads texts, whatever else there is. `max_input_len`
    and `max_target_len` bound the sides of samples beside their whole (0: not), and `tasks` is a file that gives tasks
    other bounds, and weights. Exactly one of `tokens_per_batch` and `batch_size` is above 0."""

    path: str = ""
    mixture: tuple[str, ...] = ()
    num_samples: int = 4000
    tokenizer: str = "bpe"
    vocab_size: int = 1024
    template: TemplateChoice = "auto"
    input_key: str = ""
    target_key: str = ""
    text_key: str = ""
    truncate: bool = False
    max_input_len: int = 0
    max_target_len: int = 0
    tasks: str = ""
    tokens_per_batch: int = 8192
    batch_size: int = 0
    drop_last: bool = False
    num_workers: int = 1
    prefetch_steps: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """The validation loss is taken every `every` steps (0: never) and after the last one, over the first `steps` global
    batches of a fixed order (0: all). The data are those in `path`, text or tokens, by the training data's tokenizer;
    or the `fraction` of the training data's samples that is drawn by the seed and never trained on."""

    every: int = 0
    steps: int = 0
    path: str = ""
    fraction: float = 0.0


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


def check_evaluation(settings: EvalSettings, where: str) -> None:
    """Refuse an evaluation without data, with two kinds of them, or data that no evaluation reads."""
    table, given = f"{where}: [eval]", {"path": settings.path, "fraction": settings.fraction, "steps": settings.steps}
    if not 0 <= settings.fraction < 1:
        raise ConfigError(f"{table} fraction is {settings.fraction} but must be at least 0 and below 1")
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
    if not settings.every and (named := [f"{name} is {value}" for name, value in given.items() if value]):
        raise ConfigError(
            f"{table} {' and '.join(named)} but every is 0, which never evaluates: set every, or leave the others out"
        )

"""megatron_args.sh: the options with which Megatron-LM's pretrain_gpt.py builds a checkpoint's model and loads it.

Its `--use-checkpoint-args` takes neither the norm's epsilon, RoPE scaling, the norms of queries and keys, windows, the
sequence length nor the type of the weights from a checkpoint, and dropout stays at 0.1.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from dynapipe_ext.models.architecture import Architecture
from dynapipe_ext.models.written_arguments import command_line, unsayable
from dynapipe_ext.tools.checkpoint.formats import TrainingState, WriterOptions
from dynapipe_ext.tools.checkpoint.megatron.shards import RankLayout
from dynapipe_ext.tools.files import write_atomic

SCRIPT = "megatron_args.sh"
_HERE = '"$MEGATRON_CHECKPOINT"'
_TEXT = """\
# What Megatron-LM's pretrain_gpt.py (core_v0.16) needs to build the model of this checkpoint and to load it:
#     source megatron_args.sh
#     torchrun --nproc-per-node {ranks} pretrain_gpt.py "${{MEGATRON_ARGS[@]}}" ...
# Data, batch sizes, learning rates{tokenizer} are yours. What stands later on a command line counts: --seq-length, say.
MEGATRON_CHECKPOINT=$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)
MEGATRON_ARGS=(
{options}
)
"""


def launch_options(
    layout: RankLayout, options: WriterOptions, state: TrainingState | None, files: Sequence[str]
) -> tuple[str, ...]:
    """Options for the model, its ranks, its vocabulary and the format of its `files`; none that say another model."""
    if unsayable(layout.architecture):
        return ()
    words = [*command_line(layout.architecture), "--seq-length", str(layout.architecture.max_seq_len)]
    words += ["--make-vocab-size-divisible-by", str(options.vocab_divisible_by)]
    words += ["--padded-vocab-size", str(layout.padded_vocab_size)]
    words += ["--tensor-model-parallel-size", str(layout.tp), "--pipeline-model-parallel-size", str(layout.pp)]
    if layout.ep > 1:
        words += ["--expert-model-parallel-size", str(layout.ep)]
    if layers := layout.layers_per_virtual_stage:
        words += ["--num-layers-per-virtual-pipeline-stage", str(layers)]
    if uneven := pipeline_layout(layout):
        words += ["--pipeline-model-parallel-layout", uneven]
    if state is not None:
        words.append("--no-load-rng")
    return (*words, *files)


def pipeline_layout(layout: RankLayout) -> str | None:
    """How Megatron is told of uneven stages, "Et*2|t*3L"; None where they are even."""
    counts = layout.layers_per_stage
    if len(set(counts)) == 1:
        return None
    stages = [f"t*{count}" if count else "" for count in counts]
    stages[0], stages[-1] = f"E{stages[0]}", f"{stages[-1]}L"
    return "|".join(stages)


def usage_notices(architecture: Architecture, padded_vocab_size: int) -> tuple[str, ...]:
    """What Megatron-LM would make of the checkpoint that differs from the source's model."""
    notices = []
    if lost := unsayable(architecture):
        notices.append(
            f"Megatron-LM's arguments cannot say {'; '.join(lost)}: its pretrain_gpt.py would build another model, so"
            f" there is no {SCRIPT}; dynapipe train builds this one"
        )
    elif rows := padded_vocab_size - architecture.vocab_size:
        notices.append(
            f"Megatron-LM's loss counts the {rows:,} rows that pad the vocabulary as tokens: it will lie above the"
            " source's; --vocab-divisible-by 1 pads less"
        )
    return tuple(notices)


def usage(options: Sequence[str]) -> tuple[str, ...]:
    """What to tell of them."""
    return (f"Megatron-LM's pretrain_gpt.py loads it with what {SCRIPT} says: {shlex.join(options)}",) * bool(options)


def write_script(directory: Path, options: Sequence[str], tokenizer: str, ranks: int) -> None:
    """`tokenizer`: a folder below `directory` with the files of one, or nothing."""
    lines = [["--load", _HERE]]
    for word in options:
        if word.startswith("--"):
            lines.append([word])
        else:
            lines[-1].append(shlex.quote(word))
    if tokenizer:
        lines += [["--tokenizer-type", "HuggingFaceTokenizer"], ["--tokenizer-model", f"{_HERE}/{tokenizer}"]]
    text = _TEXT.format(
        ranks=ranks,
        tokenizer="" if tokenizer else " and the tokenizer",
        options="\n".join(f"  {' '.join(line)}" for line in lines),
    )
    write_atomic(directory / SCRIPT, text)

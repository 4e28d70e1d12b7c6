"""CPU seconds a real token of fine-tuning: our plans, and what people do otherwise, on the same global batches.

    python tests/bench/finetune.py MULTITASK.jsonl.xz [--steps N] [--output results/finetune.json]

    ours           plans of one rank (documents packed, as many positions at once as the collator's rows) through
                   TransformersStage
    collator       PackingCollator in a plain loop: best-fit rows, attention document by document
    TRL-style      the same rows by position_ids alone, as TRL packs ("bfd"): without flash-attn, masks of whole rows
    length groups  transformers' get_length_grouped_indices within each global batch, padded to a group's longest

All train one small Llama of transformers from the same weights, on a core, by the same AdamW without clipping, a step
of each in turn. A global batch has the same samples for all, and its loss is the sum over its target tokens by their
number: what is compared are seconds alone, and `loss_spread` is how far the losses of the four part at most, relative.
Real tokens are positions of samples that are read; planning and collating count. The first step warms up.

Data: a part of the multi-task file, and chats of one to three turns made of it; both cut at 1024 tokens.
"""

from __future__ import annotations

import argparse
import copy
import json
import lzma
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from contenders import provenance
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.trainer_pt_utils import get_length_grouped_indices

from dynapipe_ext.batch.document_attention import register_document_attention
from dynapipe_ext.batch.micro_batches import sample_lengths
from dynapipe_ext.batch.topology import ActivationFormat, ReplicaCollectives, Topology
from dynapipe_ext.batching.packing.collator import IGNORED, PackedAttention, PackingCollator, pack_rows
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.data.batches import GlobalBatches, collate
from dynapipe_ext.data.dataset import TokenDataset, TokenSample
from dynapipe_ext.executor.engine import PipelineExecutor
from dynapipe_ext.executor.proven_step import prove_step
from dynapipe_ext.executor.stages.transformers.parts import parts_of_model
from dynapipe_ext.executor.stages.transformers.stage import TransformersStage
from dynapipe_ext.executor.transport.inline import InlineHub
from dynapipe_ext.launch.job.run_data import run_data
from dynapipe_ext.models.named_models import read_sizes
from dynapipe_ext.schedules.planner import Planner
from dynapipe_ext.settings.train_config import TrainConfig

RESULTS = Path(__file__).parent / "results"
LONGEST, ROW, ROWS = 1024, 2048, 8  # tokens of a sample and of a packed row; rows of a padded micro-batch
TOKENS_PER_BATCH, VOCABULARY = 8192, 4096
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Step = Callable[[list[int]], float]  # samples of a global batch -> its loss; gradients are left in the model


def records(path: Path, every: int) -> Iterator[dict[str, str]]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if number % every == 0:
                yield json.loads(line)


def write_data(path: Path, folder: Path, every: int) -> dict[str, Path]:
    """A file of prompts and one of chats, and the tokenizer of both in `folder`."""
    found = list(records(path, every))
    library = Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator((r["input"][:4000] + r["target"] for r in found), trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=library, eos_token="</s>")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    chats, left = [], [r for r in found if len(r["input"]) < LONGEST]  # that all targets of a chat are not cut off
    while left:
        turns, left = left[: 1 + len(chats) % 3], left[1 + len(chats) % 3 :]
        said = [(role, turn[field]) for turn in turns for role, field in (("user", "input"), ("assistant", "target"))]
        chats.append({"messages": [{"role": role, "content": content} for role, content in said]})
    files = {"multitask": found, "chats": chats}
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {name: folder / f"{name}.jsonl" for name in files}


def tokens_of(path: Path, tokenizer: Path) -> TokenDataset:
    data = {"path": str(path), "tokenizer": str(tokenizer), "truncate": True}
    run, model = {"run_dir": str(path.parent / "run")}, {"max_seq_len": LONGEST}
    return run_data(TrainConfig().with_values(data=data, run=run, model=model)).whole


def feature(sample: TokenSample) -> dict[str, Any]:
    return {"input_ids": sample.tokens, "labels": np.where(sample.is_target, sample.tokens, IGNORED)}


def ours(model: Any, data: TokenDataset) -> Step:
    costs = AnalyticCosts(
        read_sizes(model.config.to_dict()),
        Topology(),
        flops_per_s=2e10,
        layer_overhead_ns=300_000,
        activation_bytes_per_value=4,
        param_bytes=4,
    )
    form = ActivationFormat(model.config.hidden_size, "float32", order="bsh")
    collectives = ReplicaCollectives()
    planner = Planner(Topology(), costs, 2e9, layout="packed", max_tokens=ROW, format=form, collectives=collectives)
    executor = PipelineExecutor(TransformersStage(parts_of_model(model)), InlineHub().transport(0))

    def step(batch: list[int]) -> float:
        plan = prove_step(planner, sample_lengths(data.lengths, batch), step=0).plans[0][0]
        arrays = [collate(m, [data[s.index] for s in m.samples]) for m in plan.micro_batches]
        return executor.execute(plan, [{name: torch.from_numpy(a) for name, a in each.items()} for each in arrays])

    return step


def plain(model: Any, data: TokenDataset, rows_of: Callable[[list[TokenSample]], Iterator[dict[str, Any]]]) -> Step:
    """A loop over the micro-batches that `rows_of` makes of a global batch."""

    def step(batch: list[int]) -> float:
        samples = [data[index] for index in batch]
        targets, total = sum(sample.target for sample in samples), 0.0
        for inputs in rows_of(samples):
            loss = model(**inputs, num_items_in_batch=targets).loss
            loss.backward()
            total += float(loss.detach())
        return total

    return step


def packed(attention: PackedAttention) -> Callable[[list[TokenSample]], Iterator[dict[str, Any]]]:
    collator = PackingCollator(attention=attention)

    def rows_of(samples: list[TokenSample]) -> Iterator[dict[str, Any]]:
        for members in pack_rows([len(sample.tokens) for sample in samples], ROW, packing="best-fit"):
            yield collator([feature(samples[i]) for i in members])

    return rows_of


def length_groups(samples: list[TokenSample]) -> Iterator[dict[str, Any]]:
    lengths = [len(sample.tokens) for sample in samples]
    order = get_length_grouped_indices(lengths, ROWS, mega_batch_mult=len(samples))
    for start in range(0, len(order), ROWS):
        features = [feature(samples[i]) for i in order[start : start + ROWS]]
        shape = len(features), max(len(f["input_ids"]) for f in features)
        inputs = {"input_ids": np.zeros(shape, np.int64), "labels": np.full(shape, IGNORED, np.int64)}
        mask = np.zeros(shape, np.int64)
        for row, found in enumerate(features):
            for name, array in inputs.items():
                array[row, : len(found[name])] = found[name]
            mask[row, : len(found["input_ids"])] = 1
        tensors = {name: torch.from_numpy(array) for name, array in (inputs | {"attention_mask": mask}).items()}
        yield tensors | {"use_cache": False}


def compared(data: TokenDataset, num_steps: int) -> dict[str, Any]:
    """Each way's seconds a real token and losses, a step of each in turn."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=ROW, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    first = transformers.AutoModelForCausalLM.from_config(config).state_dict()

    def model(attention: str) -> Any:
        own = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention)
        own.load_state_dict(first)
        return own.train()

    documents = register_document_attention()
    trained = {name: model(documents if name in ("ours", "collator") else "sdpa") for name in WAYS}
    steps: dict[str, Step] = {
        "ours": ours(trained["ours"], data),
        "collator": plain(trained["collator"], data, packed("cu_seqlens")),
        "TRL-style": plain(trained["TRL-style"], data, packed("positions")),
        "length groups": plain(trained["length groups"], data, length_groups),
    }
    optimizers = {name: torch.optim.AdamW(own.parameters(), lr=1e-3) for name, own in trained.items()}
    batches = GlobalBatches(data.lengths, tokens_per_batch=TOKENS_PER_BATCH, seed=0)
    losses: dict[str, list[float]] = {name: [] for name in WAYS}
    cpu_s, real_tokens = dict.fromkeys(WAYS, 0.0), 0
    for number in range(num_steps + 1):
        batch = [int(index) for index in batches[number]]
        real_tokens += int(data.lengths[batch, 0].sum()) if number else 0
        for name in WAYS:
            begun = time.process_time()
            losses[name].append(steps[name](batch))
            optimizers[name].step()
            optimizers[name].zero_grad()
            cpu_s[name] += time.process_time() - begun if number else 0.0
    spread = max(max(each) / min(each) - 1 for each in zip(*losses.values(), strict=True))
    return {
        "real_tokens": real_tokens,
        "cpu_us_per_real_token": {name: round(1e6 * cpu_s[name] / real_tokens, 1) for name in WAYS},
        "last_loss": losses["ours"][-1],
        "loss_spread": spread,
    }


WAYS: Sequence[str] = ("ours", "collator", "TRL-style", "length groups")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("multitask", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--every", type=int, default=40, help="take one record in so many")
    parser.add_argument("--output", type=Path, default=RESULTS / "finetune.json")
    parser.add_argument("--machine", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        files = write_data(args.multitask, Path(scratch), args.every)
        for name, path in files.items():
            found[name] = compared(tokens_of(path, Path(scratch)), args.steps)
            print(f"{name}: {found[name]}")
    args.output.write_text(
        json.dumps({**provenance(args.machine), "steps": args.steps, "data": found}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()

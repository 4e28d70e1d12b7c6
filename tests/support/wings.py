"""The wings: rooms that one need not open to work on training, and the few lines between them and the rest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Wing:
    """A part that one need not open to work on training. `owners` are modules outside that may look past its doors."""

    rooms: tuple[str, ...]
    doors: tuple[str, ...] = ()
    visitors: tuple[str, ...] = ()  # may import the doors
    owners: tuple[str, ...] = ()
    needs: tuple[str, ...]  # patterns of what the wing may import from outside

    def holds(self, module: str) -> bool:
        return any(module == room or module.startswith(f"{room}.") for room in self.rooms)


BATCHING = Wing(
    rooms=("dynapipe_ext.batching",),
    doors=(
        "dynapipe_ext.batching.inference",
        "dynapipe_ext.batching.packing",
        "dynapipe_ext.batching.sampling",
    ),
    owners=("dynapipe_ext.launch.commands.collect_memory", "dynapipe_ext.launch.commands.train_memory_model"),
    needs=(
        "dynapipe_ext.batch.*",
        "dynapipe_ext.costs.model",
        "dynapipe_ext.data.batches",
        "dynapipe_ext.durable_files",
        "dynapipe_ext.errors",
        "dynapipe_ext.evaluating",
        "dynapipe_ext.lazy",
        "dynapipe_ext.models.named_models",
        "dynapipe_ext.peak_memory",
        "dynapipe_ext.reproducible",
    ),
)
CHECKPOINT = Wing(
    rooms=("dynapipe_ext.tools.checkpoint",),
    doors=("dynapipe_ext.tools.checkpoint",),
    visitors=(
        "dynapipe_ext.launch.commands.convert",
        "dynapipe_ext.launch.job.model_folder",
        "dynapipe_ext.launch.run.trained_model",
    ),
    needs=(
        "dynapipe_ext.durable_files",
        "dynapipe_ext.errors",
        "dynapipe_ext.executor.checkpoints.folder",  # a run's own checkpoints say which model they are of
        "dynapipe_ext.executor.stages.megatron.gather",  # weights of a running model
        "dynapipe_ext.executor.stages.megatron.stage",
        "dynapipe_ext.executor.stages.megatron.head",  # which rows a rank has of a weight
        "dynapipe_ext.lazy",
        "dynapipe_ext.models.*",
        "dynapipe_ext.tools.*",
    ),
)
PREPROCESSING = Wing(
    rooms=("dynapipe_ext.data.preprocessing",),
    doors=(  # tokenizers
        "dynapipe_ext.data.preprocessing.encoder_loading",
        "dynapipe_ext.data.preprocessing.encoders",
        "dynapipe_ext.data.preprocessing.transformers_encoder",
    ),
    visitors=("dynapipe_ext.data.dataset", "dynapipe_ext.tools.show.samples"),
    owners=(
        "dynapipe_ext.launch.commands.preprocess",
        "dynapipe_ext.launch.job.data_form",
        "dynapipe_ext.launch.job.run_data",
    ),
    needs=(
        "dynapipe_ext.data.dataset",
        "dynapipe_ext.data.examples",
        "dynapipe_ext.data.indexed_dataset",
        "dynapipe_ext.data.length_bounds",
        "dynapipe_ext.data.tokenizer",
        "dynapipe_ext.durable_files",
        "dynapipe_ext.errors",
        "dynapipe_ext.ray_cluster",
    ),
)
# The last two use the planner and what lies below it as anyone outside may; nothing of training uses them.
LOOPS = Wing(
    rooms=("dynapipe_ext.executor.drop_in", "dynapipe_ext.executor.loops"),
    owners=("dynapipe_ext.megatron", "dynapipe_ext.launch.commands.doctor"),
    needs=("dynapipe_ext", "dynapipe_ext.*"),
)
ESTIMATE = Wing(
    rooms=("dynapipe_ext.tools.estimate",),
    owners=("dynapipe_ext.launch.commands.estimate",),
    needs=("dynapipe_ext.*",),
)
WINGS = {
    "batching": BATCHING,
    "checkpoint": CHECKPOINT,
    "estimate": ESTIMATE,
    "loops": LOOPS,
    "preprocessing": PREPROCESSING,
}

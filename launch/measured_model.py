"""Whether a cost table is of the model that a run trains: what was measured of another one would promise what no rank
keeps."""

from __future__ import annotations

from dynapipe_ext.config import TrainConfig
from dynapipe_ext.costs.abilities import measured_sizes, sharded_state_bytes
from dynapipe_ext.costs.model import CostModel
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.models.architecture import VOCAB_MULTIPLE, Architecture
from dynapipe_ext.plan import round_up

# What seconds and bytes of layers follow from, by the names of `Architecture`.
_SIZES = (
    "num_layers", "num_decoder_layers", "hidden_size", "num_heads", "num_query_groups", "head_dim", "ffn_hidden_size",
    "gated_mlp", "num_experts", "top_k", "shared_ffn_hidden_size", "sliding_window", "full_attention_every",
)  # fmt: skip


def refuse_table_of_other_model(costs: CostModel, config: TrainConfig, architecture: Architecture, where: str) -> None:
    """Errors: ConfigError for a table of other layers, weights or states than those of `config`, or of a smaller head
    (a larger one counts too much, which is safe). Of a table that does not say what it is of, what it is made of tells.
    """
    found = measured_sizes(costs)
    wanted = {name: getattr(architecture, name) for name in _SIZES} | {"dtype": config.model.dtype}
    other = [f"{name} {found[name]}, not {value}" for name, value in wanted.items() if found.get(name, value) != value]
    ids, needed = found.get("vocab_size", architecture.vocab_size), architecture.vocab_size
    if round_up(ids, VOCAB_MULTIPLE) < round_up(needed, VOCAB_MULTIPLE):
        other.append(f"vocab_size {ids}, not {needed} (with a tokenizer of your own, [data] vocab_size says it)")
    if other:
        raise ConfigError(
            f"the cost table {where} is of another model than the configured one: it has {'; '.join(other)}: measure"
            " this one (dynapipe profile), or leave the table out"
        )
    divides = config.optimizer.distributed or config.deepspeed.zero_stage or config.lora.enabled
    if sharded_state_bytes(costs) and config.topology.dp > 1 and not divides:
        raise ConfigError(
            f"the cost table {where} divides optimizer states over replicas and this run does not: set [optimizer]"
            " distributed, or measure without --distributed-optimizer"
        )

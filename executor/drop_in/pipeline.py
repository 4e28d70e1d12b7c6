"""A rank's place in a Megatron job as this project sees it: topology, transport, costs of its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from dynapipe_ext.batch.micro_batches import Recompute
from dynapipe_ext.batch.topology import ActivationFormat, Coordinates, ReplicaCollectives, Topology, place_stages
from dynapipe_ext.costs.analytic import AnalyticCosts
from dynapipe_ext.costs.model import CostModel, as_cost_model
from dynapipe_ext.costs.states import count_parameters
from dynapipe_ext.costs.tokens import TokenCosts
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.device import device_bytes, gather_json
from dynapipe_ext.executor.drop_in.refusals import dense_layers
from dynapipe_ext.executor.free_memory import usable_bytes
from dynapipe_ext.executor.protocols import Transport
from dynapipe_ext.executor.stages.megatron.stage import unwrapped
from dynapipe_ext.executor.transport.torch_p2p import TorchP2PTransport, make_pipeline_groups
from dynapipe_ext.models.architecture import Architecture, LatentAttention

MegatronPlacement = Literal["interleaved", "v"]  # of the stages of ranks that hold several
_ALIKE = 0.05  # of a stage's parameters: norms of queries and keys, and biases here and there, are not counted
_SPECULATIVE_NS = 1_000  # a parameter, where nothing better is known: only ratios between stages matter


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronPipeline:
    """What planning and transfers need to know of a model and its ranks; made on all ranks at the same point.

    `counts_memory`: whether the costs say bytes. `recompute` is what the model's configuration fixes for all
    micro-batches; None leaves it to plans. `pad_multiple` is what lengths of its hidden states must be multiples of.
    `replica_collectives` are those of replicas that may run other micro-batches: gradients reduced once, after the last
    backward (`StepGradients`), and tokens that ranks with shared experts exchange inside each. `usable_bytes` is
    what plans may take without a limit, of the smallest device of all ranks; on a CPU, of the machine's memory divided
    by all ranks.
    """

    topology: Topology
    coordinates: Coordinates
    transport: Transport
    activation_format: ActivationFormat
    costs: CostModel
    counts_memory: bool
    recompute: Recompute | None
    pad_multiple: int
    replica_collectives: ReplicaCollectives
    device: torch.device
    usable_bytes: int

    @property
    def in_v(self) -> bool:
        """Whether the last stage is on the first rank."""
        return self.topology.placement_name.startswith("v,")


def megatron_pipeline(
    chunks: Sequence[Any],
    config: Any,
    groups: Any,
    *,
    vp_size: int | None = None,
    costs: CostModel | None,
    placement: MegatronPlacement,
    timeout_s: float,
) -> MegatronPipeline:
    """From the loop's process groups, a ProcessGroupCollection, and the model's configuration; `costs` stand in for
    counted ones.

    A collective call. Errors: ConfigError for ranks in another order than tp-dp-pp, and for chunks that another
    placement has elsewhere.
    """
    topology, coordinates = rank_topology(groups, len(chunks), placement, vp_size=vp_size)
    num_expert_ranks = expert_ranks(groups) if config.num_moe_experts else topology.tp
    ep = -(-num_expert_ranks // topology.tp)  # replicas whose ranks share experts
    device = next((p.device for chunk in chunks for p in chunk.parameters()), torch.device("cpu"))
    shards = topology.tp if config.sequence_parallel else 1
    dtype = str(config.pipeline_dtype or config.params_dtype).removeprefix("torch.")
    topology, num_parameters = _with_found_layers(topology, chunks, config, device)
    free_bytes = min(gather_json(_usable_bytes(device), device))
    if costs is None and num_expert_ranks % topology.tp == 0:  # else experts are cut otherwise than other layers
        costs = _counted(chunks[0], config, topology, ep)
        costs = costs if costs is not None and _has_counted_parameters(costs, num_parameters) else None
    if costs is not None:
        costs, topology = as_cost_model(costs).with_topology(topology)
    rank = dist.get_rank()
    groups = make_pipeline_groups(topology, rank, timeout_s=timeout_s)
    return MegatronPipeline(
        topology=topology,
        coordinates=coordinates,
        transport=TorchP2PTransport(topology, rank, groups, device=device, timeout_s=timeout_s),
        activation_format=ActivationFormat(config.hidden_size, dtype, sequence_shards=shards),
        costs=costs if costs is not None else _by_size(num_parameters),
        counts_memory=costs is not None,
        recompute=fixed_recompute(config),
        pad_multiple=shards,
        replica_collectives=ReplicaCollectives.of_zero(0, ep=ep),
        device=device,
        usable_bytes=free_bytes,
    )


def rank_topology(
    groups: Any, num_chunks: int, kind: MegatronPlacement = "interleaved", *, vp_size: int | None = None
) -> tuple[Topology, Coordinates]:
    """Degrees of parallelism from process groups, and where this rank is; `vp_size` stages a rank, None for one.

    Errors: ConfigError for another rank order than tp-dp-pp, and for context parallelism.
    """
    tp, pp, cp, dp = (group.size() for group in (groups.tp, groups.pp, groups.cp, groups.dp_cp))
    if cp > 1:
        raise ConfigError(
            f"context_parallel_size is {cp}, but sequences that are cut over ranks are not supported: give 1, and more"
            " tensor parallel ranks with sequence parallelism"
        )
    stages_a_rank = vp_size or 1
    if stages_a_rank != num_chunks:
        raise ConfigError(
            f"{num_chunks} model chunks were given where Megatron's state or vp_size says {stages_a_rank} a rank: give"
            " the list that get_model returned, with virtual_pipeline_model_parallel_size chunks"
        )
    placement = place_stages(kind, pp, stages_a_rank) if pp > 1 and stages_a_rank > 1 else ()
    if kind == "v" and stages_a_rank != 2:
        raise ConfigError(
            f"placement is v but each rank holds {stages_a_rank} of the model's stages: give two, by"
            " --pipeline-model-parallel-layout, on two ranks or more"
        )
    topology = Topology(tp=tp, pp=pp, dp=dp, placement=placement)
    here = Coordinates(tp_rank=groups.tp.rank(), pp_rank=groups.pp.rank(), dp_rank=groups.dp_cp.rank())
    if topology.world_size != dist.get_world_size() or topology.coordinates(dist.get_rank()) != here:
        raise ConfigError(
            f"rank {dist.get_rank()} of {dist.get_world_size()} is {here} of tp {tp} x pp {pp} x dp {dp}, which is not"
            " Megatron's default order of ranks (tp-cp-ep-dp-pp): leave out --use-tp-pp-dp-mapping"
        )
    return topology, here


def expert_ranks(groups: Any) -> int:
    """How many ranks a layer's experts lie on. Megatron counts them by themselves (--expert-tensor-parallel-size), over
    tensor parallel ranks and replicas alike."""
    from megatron.core import parallel_state as state

    if hasattr(groups, "ep") and hasattr(groups, "expt_tp"):
        return int(groups.ep.size() * groups.expt_tp.size())
    return int(state.get_expert_model_parallel_world_size() * state.get_expert_tensor_parallel_world_size())


def fixed_recompute(config: Any) -> Recompute | None:
    """What the user's --recompute-* come to for costs: partly recomputed layers count as fully recomputed ones. None
    where they fix nothing."""
    match config.recompute_granularity:
        case None:
            return None
        case "selective":
            return "selective"
        case _:
            return "full"


def _with_found_layers(
    topology: Topology, chunks: Sequence[Any], config: Any, device: torch.device
) -> tuple[Topology, tuple[int, ...]]:
    """The topology with the layers that ranks really hold, and the parameters of every stage."""
    from megatron.core.transformer.transformer_layer import BaseTransformerLayer

    own = [
        (
            sum(isinstance(module, BaseTransformerLayer) for module in chunk.modules()),
            sum(parameter.numel() for parameter in chunk.parameters()),
            [getattr(unwrapped(chunk), end, None) for end in ("pre_process", "post_process")],
        )
        for chunk in chunks
    ]
    of_ranks = gather_json(own, device)
    ranks = [topology.rank(tp_rank=0, pp_rank=pp_rank, dp_rank=0) for pp_rank in topology.stage_ranks]
    places = [topology.stages_of(pp_rank).index(stage) for stage, pp_rank in enumerate(topology.stage_ranks)]
    by_stage = [of_ranks[rank][place] for rank, place in zip(ranks, places, strict=True)]
    layers, num_parameters, ends = (tuple(column) for column in zip(*by_stage, strict=True))
    for stage, (is_first, is_last) in enumerate(ends):
        if (is_first, is_last) not in ((None, None), (stage == 0, stage == topology.num_stages - 1)):
            raise ConfigError(
                f"stage {stage} of {topology.num_stages}, by placement {topology.placement_name} on pipeline rank"
                f" {topology.stage_ranks[stage]}, was built with pre_process {is_first} and post_process {is_last}: the"
                " model lies otherwise; give the placement that it was built for"
            )
    if sum(layers) == config.num_layers:
        topology = replace(topology, layers_per_stage=layers)
    return topology, num_parameters


def _counted(chunk: Any, config: Any, topology: Topology, ep: int) -> AnalyticCosts | None:
    """Costs counted from the configuration of a GPTModel whose layers all lie where they should; None for others."""
    architecture = counted_architecture(unwrapped(chunk), config)
    if architecture is None or not topology.layers_per_stage:
        return None
    ddp_config = getattr(chunk, "ddp_config", None)
    num_bytes = 4 if config.params_dtype == torch.float32 else 2
    return AnalyticCosts(
        architecture,
        topology,
        activation_bytes_per_value=num_bytes,  # type: ignore[arg-type]
        param_bytes=num_bytes,  # type: ignore[arg-type]
        sequence_parallel=bool(config.sequence_parallel),
        flash=config.transformer_impl != "local",
        distributed_optimizer=bool(getattr(ddp_config, "use_distributed_optimizer", False)),
        dropout=bool(config.hidden_dropout or config.attention_dropout),
        ep=ep,
    )


def counted_architecture(model: Any, config: Any) -> Architecture | None:
    """The sizes of a running GPTModel, of its whole layers on all ranks; None for other models."""
    if type(model).__name__ != "GPTModel":
        return None
    dense = dense_layers(config)
    num_experts = (config.num_moe_experts or 0) if len(dense) < config.num_layers else 0
    come_first = dense == tuple(range(len(dense)))
    is_gated = bool(config.gated_linear_unit)
    architecture = Architecture.gpt(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups or config.num_attention_heads,
        ffn_hidden_size=(config.moe_ffn_hidden_size if num_experts else None) or config.ffn_hidden_size,
        gated_mlp=is_gated,
        vocab_size=model.vocab_size,
        max_seq_len=model.max_sequence_length,
        tied_embeddings=bool(model.share_embeddings_and_output_weights),
        position="learned" if model.position_embedding_type == "learned_absolute" else "rope",
        norm="rmsnorm" if config.normalization == "RMSNorm" else "layernorm",
        bias=bool(config.add_bias_linear),
        num_experts=num_experts,
        top_k=config.moe_router_topk if num_experts else 0,
        head_dim=config.kv_channels,
        qkv_bias=bool(config.add_qkv_bias),
    )
    return replace(
        architecture,
        shared_ffn_hidden_size=config.moe_shared_expert_intermediate_size or 0 if num_experts else 0,
        num_dense_layers=len(dense) if num_experts and come_first else 0,
        dense_layers=dense if num_experts and not come_first else (),
        dense_ffn_hidden_size=config.ffn_hidden_size if num_experts and dense else 0,
        **_latent(config),
    )


def _has_counted_parameters(costs: AnalyticCosts, num_parameters: Sequence[int]) -> bool:
    """Whether the stages were built with about as many as were counted: else layers are of kinds that were not."""
    counted = count_parameters(costs.architecture, costs.topology, costs.ep).total.tolist()
    return all(abs(one - built) <= _ALIKE * built for one, built in zip(counted, num_parameters, strict=True))


def _latent(config: Any) -> dict[str, Any]:
    """What latent attention changes of an architecture."""
    if not config.multi_latent_attention:
        return {}
    latent = LatentAttention(
        q_rank=config.q_lora_rank or 0,
        kv_rank=config.kv_lora_rank,
        plain_dim=config.qk_head_dim,
        rotary_dim=config.qk_pos_emb_head_dim,
        value_dim=config.v_head_dim,
    )
    return {"latent": latent, "head_dim": latent.plain_dim + latent.rotary_dim, "position": "rope"}


def _by_size(num_parameters: Sequence[int]) -> TokenCosts:
    """Of any other model: every stage takes a time in proportion to its parameters."""
    largest = max(1, *num_parameters)
    scale = tuple(max(n / largest, 0.01) for n in num_parameters)
    return TokenCosts(len(num_parameters), ns_per_token=_SPECULATIVE_NS, bytes_per_token=1, stage_scale=scale)


def _usable_bytes(device: torch.device) -> int:
    """What plans may take of a rank's device, or of its part of the machine, where nobody sets a limit."""
    num_bytes = device_bytes(device)
    return usable_bytes(num_bytes if device.type == "cuda" else num_bytes // int(dist.get_world_size()))

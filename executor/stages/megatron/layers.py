"""What layers of published models are made of: norms, biases, latent attention, angles that turn queries and keys."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from dynapipe_ext.batch.topology import StageLayers
from dynapipe_ext.executor.device import runs_kernels
from dynapipe_ext.executor.stages.kernels import GatedActivation, gated, turn
from dynapipe_ext.executor.stages.megatron.attention_variants import (
    UnitNorm,
    capped,
    in_chunks,
    scaled_by_position,
    with_sinks,
)
from dynapipe_ext.executor.stages.megatron.core_attention import CoreAttention, WindowAttention
from dynapipe_ext.models.architecture import Activation, Architecture, layer_kinds
from dynapipe_ext.models.family_configs import LATENT_NORM_EPS
from dynapipe_ext.models.rope_scaling import LongRope, Yarn

_LENGTHS = "dynapipe_lengths"  # attribute of a tensor of borders: the documents' lengths, on the host
_ANGLES = "dynapipe_angles"  # attribute of a tensor of borders: angles, and those of the row's positions
IN_ONE_PASS = "dynapipe_in_one_pass"  # attribute of a configuration of ours: its models take kernels where they can
_NAME = "_apply_rotary_pos_emb_thd"
# The functions, by module and name, that `rotate_without_waiting` replaces.
ROTATIONS = (
    ("megatron.core.models.common.embeddings.rope_utils", _NAME),
    ("megatron.core.transformer.attention", "apply_rotary_pos_emb"),
)
_TURNS = {"rotary_interleaved", "multi_latent_attention", "mscale", "cp_group"}  # options that kernels know
YARN_FACTOR = "yarn_rotary_scaling_factor"  # an attribute of TransformerConfig that makes attention concentrate


def with_lengths(borders: torch.Tensor, lengths: Sequence[int], span: range | None = None) -> torch.Tensor:
    """Borders that know on the host what they are of, and which positions of the row are this rank's (None: all)."""
    setattr(borders, _LENGTHS, (tuple(lengths), span))
    return borders


def angles_of(freqs: torch.Tensor, lengths: Sequence[int], span: range | None) -> torch.Tensor:
    """Of the positions in `span` of a row; `freqs` are of all its positions, or of those of a document from 0 on."""
    if len(freqs) == sum(lengths):
        return freqs if span is None else freqs[span.start : span.stop]
    begin, of_documents = 0, []
    for length in lengths:
        first, last = 0, length
        if span is not None:
            first, last = max(0, span.start - begin), min(length, span.stop - begin)
        if first < last:
            of_documents.append(freqs[first:last])
        begin += length
    return torch.cat(of_documents)


def rotate_without_waiting() -> None:
    """Put functions of the same arithmetic in the place of Megatron's; idempotent.

    For borders without lengths, and padded rows of models that are not ours, they call Megatron's own: nothing changes
    for other users in this process.
    """
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer import attention

    original = getattr(rope_utils, _NAME)
    if getattr(original, "knows_lengths", False):
        return

    def rotate(x_THD: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, **options: Any) -> Any:
        row: tuple[tuple[int, ...], range | None] | None = getattr(cu_seqlens, _LENGTHS, None)
        group = options.pop("cp_group", None)
        if row is None or (group is not None and group.size() > 1):
            return original(x_THD, cu_seqlens, freqs, cp_group=group, **options)
        if row[1] is None or not options.get("multi_latent_attention"):  # whose angles are of the slice: _LatentAngles
            freqs = _angles_of_row(freqs, cu_seqlens, row)
        return _turned(x_THD.unsqueeze(1), freqs, **options).squeeze(1)

    rotate.knows_lengths = True  # type: ignore[attr-defined]
    setattr(rope_utils, _NAME, rotate)
    turn_any = attention.apply_rotary_pos_emb

    def turn_rows(t: torch.Tensor, freqs: torch.Tensor, config: Any, cu_seqlens: Any = None, **options: Any) -> Any:
        if cu_seqlens is None and getattr(config, IN_ONE_PASS, False) and _turns_by_kernel(t, freqs, options):
            return turn(t, freqs, interleaved=config.rotary_interleaved, factor=options.get("mscale", 1.0))
        return turn_any(t, freqs, config, cu_seqlens=cu_seqlens, **options)

    attention.apply_rotary_pos_emb = turn_rows


def _angles_of_row(
    freqs: torch.Tensor, borders: torch.Tensor, row: tuple[tuple[int, ...], range | None]
) -> torch.Tensor:
    """Made once for all layers that turn by the same angles one after the other."""
    kept: tuple[torch.Tensor, torch.Tensor] | None = getattr(borders, _ANGLES, None)
    if kept is None or kept[0] is not freqs:
        kept = freqs, angles_of(freqs, *row)
        setattr(borders, _ANGLES, kept)
    return kept[1]


def _turned(x_SBHD: torch.Tensor, freqs: torch.Tensor, **options: Any) -> torch.Tensor:
    """By a kernel where the device runs it, else by Megatron's arithmetic."""
    from megatron.core.models.common.embeddings import rope_utils

    if _turns_by_kernel(x_SBHD, freqs, options):
        return turn(x_SBHD, freqs, interleaved=options["rotary_interleaved"], factor=options.get("mscale", 1.0))
    turned: torch.Tensor = rope_utils._apply_rotary_pos_emb_bshd(x_SBHD, freqs, **options)
    return turned


def _turns_by_kernel(x_SBHD: torch.Tensor, freqs: torch.Tensor, options: dict[str, Any]) -> bool:
    """Whether all rows turn by the same angles, in a way that the kernel knows, on a device that runs it."""
    is_known = options.keys() <= _TURNS and not options.get("multi_latent_attention")
    return is_known and freqs.numel() == len(freqs) * freqs.shape[-1] and runs_kernels(x_SBHD)


_GATED: dict[Activation, GatedActivation] = {"silu": "silu", "gelu_tanh": "gelu_tanh", "gelu": "gelu"}


def gate_in_one_pass(model: torch.nn.Module, architecture: Architecture) -> None:
    """Have a model's MLPs, and its experts, compute a gated activation by one kernel, where the device runs it."""
    a = architecture
    if not a.gated_mlp or a.activation not in _GATED or a.gate_clamp or a.up_offset:
        return
    for mlp in model.modules():
        if type(mlp) is MLP:
            mlp.__class__ = _GatedMLP
            mlp.__dict__["one_pass"] = _GATED[a.activation]


class _GatedMLP(MLP):  # type: ignore[misc] # megatron has no types
    one_pass: GatedActivation

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        has_bias = getattr(self.linear_fc2, "bias", None) is not None
        if (per_token_scale is not None and has_bias) or not runs_kernels(hidden_states):
            output: tuple[torch.Tensor, torch.Tensor | None]
            output = super().forward(hidden_states, per_token_scale, **options)
            return output
        y, bias = self.linear_fc1(hidden_states)
        x = gated(y if bias is None else y + bias, self.one_pass)
        if per_token_scale is not None:
            x = (x * per_token_scale.unsqueeze(-1)).to(x.dtype)
        output = self.linear_fc2(x)
        return output


class MarkedNorm:
    """torch's norm, marked for the reduction that sequence parallelism needs, which Megatron's wrapper refuses."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        kind: Any = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        if config.layernorm_zero_centered_gamma:
            kind = ZeroCenteredRMSNorm if config.normalization == "RMSNorm" else ZeroCenteredLayerNorm
        norm: torch.nn.Module = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class ZeroCenteredRMSNorm(torch.nn.Module):
    """RMSNorm whose weight is kept as its distance from 1; computed in float32, as Gemma is."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.float())).type_as(x)


class ZeroCenteredLayerNorm(torch.nn.Module):
    """LayerNorm whose weight is kept as its distance from 1, as Nemotron's is."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight + 1.0, self.bias, self.eps)


class _SumOverRanks(torch.autograd.Function):
    """The sum over tensor parallel ranks of what each then uses for its own part, so gradients are summed as well."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        total = partial.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class WholeNorm(torch.nn.Module):
    """RMSNorm of queries or of keys over all heads of all tensor parallel ranks; each rank has its heads' weights.

    Takes and gives (S, B, heads of this rank, D), or (T, heads, D).
    """

    num_heads_of = "num_attention_heads"

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

        super().__init__()
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.eps, self.size = eps, getattr(config, self.num_heads_of) * hidden_size
        self.weight = torch.nn.Parameter(torch.ones(self.size // config.tensor_model_parallel_size))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        x = heads.flatten(-2).float()
        squares = x.pow(2).sum(-1, keepdim=True)
        if self.group.size() > 1:
            squares = _SumOverRanks.apply(squares, self.group)  # type: ignore[no-untyped-call] # torch's own
        normed = x * torch.rsqrt(squares / self.size + self.eps)
        return (self.weight * normed).to(heads.dtype).view_as(heads)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint({"weight": self.weight}, prefix, {"weight": 0}, sharded_offsets)


class WholeKeyNorm(WholeNorm):
    num_heads_of = "num_query_groups"


def gpt_layers(architecture: Architecture, config: Any, layers: StageLayers) -> list[Any]:
    """Megatron's specs of a stage's layers of a decoder-only model."""
    a = architecture
    kinds = {i: kind for kind, run in layer_kinds(a) for i in run if i in layers.held}
    makes = {i: (kinds[i], a.has_window(i), a.turns(i)) for i in sorted(kinds)}
    specs = {make: _gpt_layer(make[0], config, has_window=make[1], turns=make[2]) for make in makes.values()}
    return [_half_layer(specs[make], layers, i) for i, make in makes.items()]


def _half_layer(layer: Any, layers: StageLayers, number: int) -> Any:
    """The spec of a layer of which a stage may have a half alone: the hidden states pass through the other half."""
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

    absent: dict[str, Any] = {}
    if number not in layers.attention:
        absent |= {"input_layernorm": IdentityOp, "self_attention": IdentityOp, "self_attn_bda": IdentityFuncOp}
    if number not in layers.mlp:
        absent |= {"pre_mlp_layernorm": IdentityOp, "mlp": IdentityOp, "mlp_bda": IdentityFuncOp}
    return replace(layer, submodules=replace(layer.submodules, **absent)) if absent else layer


def _gpt_layer(architecture: Architecture, config: Any, *, has_window: bool, turns: bool) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.identity_op import IdentityOp

    a = architecture
    if a.num_experts:
        _name_absent_kernels()
    layer = get_gpt_layer_local_spec(
        num_experts=a.num_experts or None,
        moe_grouped_gemm=False,
        qk_layernorm=a.qk_norm,
        multi_latent_attention=a.latent is not None,
        normalization=config.normalization,
    )
    before = MarkedNorm if a.norm_placement != "post" else IdentityOp
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = before
    if a.latent:
        make_latent(layer)
        return layer
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = _core_attention(a, has_window=has_window, turns=turns)
    if a.qk_unit_norm and turns:  # the whole head turns, which leaves its norm as it is
        attention.q_layernorm = attention.k_layernorm = UnitNorm
    if has_window and a.local_rope_theta:
        local = replace(a, rope_theta=a.local_rope_theta, rope_scaling=None)
        spec = layer.submodules.self_attention
        spec.module = turned_by(spec.module, rotary_frequencies(local))
    if a.qk_norm:
        attention.q_layernorm = WholeNorm if a.qk_norm_whole else MarkedNorm
        attention.k_layernorm = WholeKeyNorm if a.qk_norm_whole else MarkedNorm
    if a.qkv_bias != config.add_bias_linear:
        attention.linear_qkv = _with_bias(attention.linear_qkv, a.qkv_bias)
    if a.attention_output_bias != config.add_bias_linear:
        attention.linear_proj = _with_bias(attention.linear_proj, a.attention_output_bias)
    mlp = layer.submodules.mlp.submodules
    if a.num_experts and a.mlp_bias:
        expert = mlp.experts.submodules
        expert.linear_fc2 = _with_shared_bias(expert.linear_fc2)
    if a.norm_placement != "pre":
        attention.linear_proj, mlp.linear_fc2 = _before_norm(attention.linear_proj), _before_norm(mlp.linear_fc2)
    if a.residual_scale != 1:
        attention.linear_proj = _times(attention.linear_proj, a.residual_scale)
        mlp.linear_fc2 = _times(mlp.linear_fc2, a.residual_scale)
    return layer


def _core_attention(a: Architecture, *, has_window: bool, turns: bool) -> type:
    """The attention of a layer, with all that the model adds to its scores."""
    core: type = WindowAttention if has_window else CoreAttention
    if a.attention_softcap:
        core = capped(core, a.attention_softcap)
    if a.attention_chunk and turns:
        core = in_chunks(core, a.attention_chunk)
    if a.temperature_floor and not turns:
        core = scaled_by_position(core, a.temperature_floor, a.temperature_scale)
    return with_sinks(core) if a.attention_sinks else core


def _name_absent_kernels() -> None:
    """megatron-core 0.16.1's router asks for Transformer Engine's kernel by a name that is undefined without it."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _with_bias(linear: type, bias: bool) -> type:
    """A class of Megatron's linear layers whose bias is not what the configuration says of all."""

    class Linear(linear):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **(keywords | {"bias": bias}))

    return Linear


def _with_shared_bias(linear: type) -> type:
    """A class of experts' row-parallel linear layers, each rank of which gives its part of the bias.

    Megatron's experts add it on every rank before the ranks' outputs are summed, so it refuses biases there; and in
    place, which autograd refuses for what one rank's sum gives.
    """

    class Linear(linear):  # type: ignore[misc]
        def forward(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
            output, bias = super().forward(*arguments)
            return output.clone(), bias / self.config.expert_tensor_parallel_size

    return Linear


def _times(linear: type, scale: float) -> type:
    """A class of Megatron's row-parallel linear layers that multiplies what it gives, its bias added."""

    class Linear(linear):  # type: ignore[misc]
        def forward(self, *arguments: Any) -> tuple[torch.Tensor, None]:
            output, bias = super().forward(*arguments)
            return (output if bias is None else output + bias) * scale, None

    return Linear


def _before_norm(linear: type) -> type:
    """A class of Megatron's row-parallel linear layers that norms what it gives, its bias added."""

    class Linear(linear):  # type: ignore[misc]
        def __init__(self, *arguments: Any, config: Any, **keywords: Any) -> None:
            super().__init__(*arguments, config=config, **keywords)
            self.post_layernorm = MarkedNorm(config, config.hidden_size, config.layernorm_epsilon)

        def forward(self, *arguments: Any) -> tuple[torch.Tensor, None]:
            output, bias = super().forward(*arguments)
            return self.post_layernorm(output if bias is None else output + bias), None

    return Linear


def make_latent(layer: Any) -> None:
    """Put what is exact here into Megatron's spec of a layer with latent attention."""
    if not isinstance(multi_latent_attention.TELinear, type):  # absent, but 0.16.1 asks who is of that class
        multi_latent_attention.HAVE_TE = False
    attention = layer.submodules.self_attention
    attention.module = SummedLatentAttention
    attention.submodules.q_layernorm = attention.submodules.kv_layernorm = LatentNorm
    attention.submodules.core_attention = LatentCoreAttention


class LatentNorm:
    """A marked norm with the epsilon of latent vectors."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 0.0, **_: Any) -> Any:
        return MarkedNorm(config, hidden_size, LATENT_NORM_EPS)


class LatentCoreAttention(CoreAttention):
    """Values are narrower than keys: kernels of flash-attn, which want them alike, are given zeros besides."""

    carries = False

    def _by_kernel(self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, **options: Any) -> torch.Tensor:
        width = v_THD.shape[-1]
        widened = F.pad(v_THD, (0, q_THD.shape[-1] - width))
        return super()._by_kernel(q_THD, k_THD, widened, **options)[..., :width]


class SummedLatentAttention(MLASelfAttention):  # type: ignore[misc] # megatron has no types
    """Megatron's own, with the gradient of the turned key summed over tensor parallel ranks."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        if self.config.tensor_model_parallel_size > 1:
            self.linear_kv_down_proj.register_forward_hook(self._gathered)

    def _gathered(
        self, _module: torch.nn.Module, _inputs: Any, output: tuple[torch.Tensor, Any]
    ) -> tuple[torch.Tensor, Any]:
        """Whole, as Megatron's forward takes it from a projection that is not divided: under sequence parallelism this
        rank's positions, of which it gathers the turned part and scatters its gradient, summed."""
        whole = gather_from_tensor_model_parallel_region(output[0])
        if self.config.sequence_parallel:
            return scatter_to_sequence_parallel_region(whole), output[1]
        latent, turned = whole.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
        turned = copy_to_tensor_model_parallel_region(turned)
        if turned.requires_grad:  # Megatron sums a copy of what is not contiguous, and returns it as it was
            turned.register_hook(torch.Tensor.contiguous)
        return torch.cat([latent, turned], dim=-1), output[1]


def rotary_frequencies(architecture: Architecture) -> torch.Tensor:
    """Radians a position, float32, shape (values that turn / 2,): of transformers, in the same order of operations.

    "llama3": wavelengths above `original / low_freq_factor` are stretched by `factor`, those below `original /
    high_freq_factor` stay, and in between the two are blended (Llama 3.1's release code).
    """
    a, scaling = architecture, architecture.rope_scaling
    assert not a.latent, "latent attention has frequencies of its own"
    width = a.rotary_dim or a.head_dim
    exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    if isinstance(scaling, Yarn):
        return _yarn_frequencies(scaling, a.rope_theta, exponents)
    if isinstance(scaling, LongRope):  # samples are no longer than was trained (most_exact_tokens)
        return 1.0 / (torch.tensor(scaling.short_factors) * a.rope_theta**exponents)
    frequencies = 1.0 / (a.rope_theta**exponents)
    if scaling is None or scaling.kind == "dynamic":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_max_seq_len / scaling.low_freq_factor
    shortest = scaling.original_max_seq_len / scaling.high_freq_factor
    share = (scaling.original_max_seq_len / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    stretched = frequencies / scaling.factor
    blended = (1 - share) * frequencies / scaling.factor + share * frequencies
    return torch.where(wavelengths < shortest, frequencies, torch.where(wavelengths > longest, stretched, blended))


def concentrate(config: Any, architecture: Architecture) -> None:
    """Have attention multiply turned queries and keys as the model's stretched frequencies ask for, through
    megatron-core's own names, which its TransformerConfig does not declare."""
    match architecture.rope_scaling:
        case Yarn() as yarn:
            factor, config.yarn_mscale, config.yarn_mscale_all_dim = yarn.factor, yarn.mscale, yarn.mscale_all_dim
        case LongRope() as stretched:  # megatron-core: 0.1 x mscale x log(factor) + 1
            factor, config.yarn_mscale, config.yarn_mscale_all_dim = math.e, 10 * (stretched.attention_factor - 1), 0.0
        case _:
            return
    setattr(config, YARN_FACTOR, factor)


def _yarn_frequencies(yarn: Yarn, theta: float, exponents: torch.Tensor) -> torch.Tensor:
    """Blended between the (whole) numbers of dimensions that turn `beta_fast` and `beta_slow` times (Peng et al. 2023,
    sec. 3.2)."""
    width = 2 * len(exponents)

    def dimension_of(turns: float) -> float:
        return width * math.log(yarn.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(yarn.beta_fast), dimension_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = (torch.arange(width // 2).float() - low) / (high - low if high != low else 0.001)
    unstretched = 1 - torch.clamp(ramp, 0, 1)
    powers = theta**exponents
    return 1.0 / (yarn.factor * powers) * (1 - unstretched) + 1.0 / powers * unstretched


def turned_by(attention: type, frequencies: torch.Tensor) -> type:
    """A class of Megatron's self attention that turns queries and keys by its own frequencies, not the model's, and
    does not stretch them as the model does."""

    class Turned(attention):  # type: ignore[misc]
        def __init__(self, config: Any, *arguments: Any, **keywords: Any) -> None:
            super().__init__(config, *arguments, **keywords)
            if hasattr(config, YARN_FACTOR):
                self.config = copy.copy(config)
                delattr(self.config, YARN_FACTOR)

        def forward(self, *arguments: Any, rotary_pos_emb: torch.Tensor, **keywords: Any) -> Any:
            joined, length = self.core_attention.joined, rotary_pos_emb.shape[0]
            # A packed row's angles are of the whole row, or of a document, of which the turning takes a slice.
            first = 0 if joined is None or keywords.get("packed_seq_params") is not None else joined.number * length
            positions = torch.arange(first, first + length, dtype=torch.float32, device=rotary_pos_emb.device)
            angles = torch.outer(positions, frequencies.to(rotary_pos_emb.device)).repeat(1, 2)
            return super().forward(*arguments, rotary_pos_emb=angles[:, None, None], **keywords)

    return Turned

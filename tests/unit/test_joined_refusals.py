"""What cannot compute a slice of a row is refused before its first step, by its name and with the next move."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.stages import megatron_cpu

megatron_cpu.install()
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding  # noqa: E402
from megatron.core.transformer.attention import Attention  # noqa: E402

from dynapipe_ext.executor.stages.megatron.core_attention import DocumentAttention  # noqa: E402
from dynapipe_ext.executor.stages.megatron.placed_rows import take_slices  # noqa: E402
from dynapipe_ext.executor.stages.megatron.t5_attention import PairAttention  # noqa: E402

CORE = SimpleNamespace(attention_dropout=0.0, deterministic_mode=False)
PLAIN = {
    "multi_latent_attention": False,
    "apply_rope_fusion": False,
    "num_moe_experts": None,
    "moe_router_load_balancing_type": "none",
    "moe_expert_capacity_factor": None,
}
FOUR: Any = SimpleNamespace(width=4, number=1)


class Layer(Attention):
    """Attention of which only what is looked at is there."""

    def __init__(self, core: Any, config: Any) -> None:
        torch.nn.Module.__init__(self)
        self.core_attention, self.config, self.num_attention_heads_per_partition = core, config, 6

    def get_query_key_value_tensors(self, *_: Any) -> Any: ...


def model(core: Any = None, **changes: Any) -> Any:
    made: Any = torch.nn.Module()
    made.config = SimpleNamespace(**PLAIN | changes)
    made.layer = Layer(core or DocumentAttention(CORE, 1), made.config)
    return made


class OtherRotary(torch.nn.Module):
    """Stands for any other kind of rotary embedding."""


def with_rotary(rotary: Any) -> Any:
    made = model()
    made.rotary_pos_emb = rotary
    return made


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: model(apply_rope_fusion=True), r"\(apply_rope_fusion\), which does not know slices"),
        (lambda: model(torch.nn.Identity()), "attends by Identity, which does not exchange positions for heads"),
        (lambda: model(num_moe_experts=4, moe_router_load_balancing_type="aux_loss"), "aux_loss.*a slice sees a part"),
        (lambda: model(moe_expert_capacity_factor=1.0), r"capacity_factor 1.0\), which drop tokens .* in their slice"),
        (lambda: with_rotary(OtherRotary()), "turned by OtherRotary, which is not known to give those of slices"),
    ],
)
def test_a_model_that_would_train_wrongly_on_slices_is_refused(made: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"{says}.* take width 1"):
        take_slices(made(), FOUR)


def test_two_sides_take_no_more_joined_ranks_than_divide_their_heads() -> None:
    made = model(PairAttention(CORE, 1))
    take_slices(made, SimpleNamespace(width=2, number=0))  # type: ignore[arg-type]
    says = r"has 6 heads .* which 4 joined ranks cannot divide, .* take a width up to 2"
    with pytest.raises(ConfigError, match=says):
        take_slices(made, FOUR)


def test_what_is_ready_once_joins_and_parts_again() -> None:
    made = with_rotary(RotaryEmbedding(8, 1.0))
    take_slices(made, None)
    assert not made._forward_pre_hooks
    take_slices(made, FOUR)
    assert made.layer.core_attention.joined is FOUR
    assert len(made._forward_pre_hooks) == 1
    take_slices(made, None)
    assert made.layer.core_attention.joined is None
    take_slices(made, FOUR)
    assert len(made._forward_pre_hooks) == 1

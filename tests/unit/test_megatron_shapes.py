"""Shapes that the Megatron stage does not build are refused by name, before Megatron is asked for anything."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dynapipe_ext.costs.analytic import ModelShape
from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.stages.megatron_model import build_model, transformer_config
from dynapipe_ext.topology import Topology

SHAPE = ModelShape(2, 32, 4, 4, 64, False, 128, 64, True)


def test_experts_are_refused_rather_than_built_as_dense_layers() -> None:
    experts = replace(SHAPE, num_experts=8, top_k=2)
    with pytest.raises(ConfigError, match="num_experts is 8 but this stage builds dense layers alone"):
        transformer_config(experts, Topology(), dtype="float32", sequence_parallel=False)
    with pytest.raises(ConfigError, match="num_experts is 8 but this stage builds dense layers alone"):
        build_model(experts, Topology(), 0, None, seed=0, device=torch.device("cpu"))

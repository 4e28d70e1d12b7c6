"""The real Megatron-LM (core_v0.16.1), where a copy is at hand: `../shared` of a checkout may lend one."""

from pathlib import Path

SHARED = Path(__file__).resolve().parents[3] / "shared"
MEGATRON_LM = SHARED / "data" / "megatron-lm-core_v0.16.1.tar.xz"

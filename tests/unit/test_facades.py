"""The names that packages offer on first use."""

import subprocess
import sys
from typing import Any

import pytest

import dynapipe_ext
from dynapipe_ext import megatron
from dynapipe_ext.batching import inference, packing, sampling
from dynapipe_ext.tools import checkpoint
from tests.support.limits import LIMIT_S


@pytest.mark.parametrize("facade", [checkpoint, dynapipe_ext, inference, megatron, packing, sampling])
def test_every_name_that_a_package_offers_is_there_under_its_own_name(facade: Any) -> None:
    for name in facade.__all__:
        thing = getattr(facade, name)
        assert name == name.upper() or thing.__name__ == name
    assert set(facade.__all__) <= set(dir(facade))
    with pytest.raises(AttributeError, match="no attribute 'Sampler'"):
        _ = facade.Sampler


def test_samplers_need_no_torch() -> None:
    script = (
        "import sys; from dynapipe_ext.batching.sampling import MultipackDistributedBatchSampler as S;"
        "from dynapipe_ext.batching.sampling import StreamingTokenBatches;"
        "print(len(S(8, [3, 5, 2, 4])), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2 False\n", "")

"""Which causal models of transformers can be cut into stages, of all families that the installed version has.

    python tests/bench/causal_families.py [--families olmo2 …] [--output results/causal_families.json]

Of each family its default configuration is proven as a run proves a model's (`cut_proof`): a layer a stage against one
stage, bit for bit, and padded and packed rows against single documents. A figure is CPU seconds; what is refused says
why. A family's result is kept until it is measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).parents[2]))

from contenders import provenance

from dynapipe_ext.errors import ConfigError
from dynapipe_ext.executor.stages.transformers.cut_proof import proven_cut
from dynapipe_ext.models.module_tree import causal_class

RESULTS = Path(__file__).parent / "results"


def proven(family: str) -> dict[str, Any]:
    """What a run would say of the family's default configuration."""
    start_s = time.process_time()
    try:
        config = CONFIG_MAPPING[family]()
    except Exception as error:  # noqa: BLE001 (a class of the library; its name is the result)
        return {"refused": f"transformers makes no default configuration ({type(error).__name__})"}
    try:
        cut = proven_cut(causal_class(config), config)
    except ConfigError as error:
        return {"refused": str(error)}
    layout = "padded" if cut.packed_fault else f"packed by {cut.attention or 'its own attention'}"
    return {"rows": layout, "layers": cut.pattern.layers, "cpu_s": round(time.process_time() - start_s, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    parser.add_argument("--output", type=Path, default=RESULTS / "causal_families.json")
    parser.add_argument("--machine", default="")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    results: dict[str, Any] = {}
    if args.output.exists():
        results = json.loads(args.output.read_text())["families"]
    for family in args.families:
        results[family] = proven(family)
        print(family, results[family], flush=True)
        result = {**provenance(args.machine), "transformers": transformers.__version__, "families": results}
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    rows = [one.get("rows", "refused").split()[0] for one in results.values()]
    print(", ".join(f"{rows.count(kind)} {kind}" for kind in ("packed", "padded", "refused")))


if __name__ == "__main__":
    main()

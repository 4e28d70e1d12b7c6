"""Which causal models of transformers can be cut into stages, of all families that the installed version has.

    python tests/bench/causal_families.py [--families olmo2 …] [--limit-s 300] [--output results/causal_families.json]

Of each family its default configuration (with small sizes where the defaults make no model) is proven as a run proves a
model's (`cut_proof`): a layer a stage against one stage, bit for bit, and padded and packed rows against single
documents. A figure is CPU seconds; what is refused says
why. Each family has a process of its own, and `--limit-s` seconds. A family's result is kept until it is measured
again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
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
SIZES = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "layer_types": ["full_attention"] * 4,
}  # fmt: skip


def proven(family: str) -> dict[str, Any]:
    """What a run would say of the family's default configuration."""
    start_s = time.process_time()
    try:
        config = CONFIG_MAPPING[family]()
    except Exception as error:  # noqa: BLE001 (a class of the library; its name is the result)
        return {"refused": f"transformers makes no default configuration ({type(error).__name__})"}
    refusal, sizes = "", {name: size for name, size in SIZES.items() if name in config.to_dict()}
    for make in (lambda: config, lambda: CONFIG_MAPPING[family](**sizes)):
        try:
            made = make()
            cut = proven_cut(causal_class(made), made)
            break
        except ConfigError as error:
            refusal = refusal or str(error)
            if "makes no" not in refusal and "no small" not in refusal:
                return {"refused": refusal}
        except Exception:  # noqa: BLE001 (sizes that a family checks in its own way)
            return {"refused": refusal}
    else:
        return {"refused": refusal}
    layout = "padded" if cut.packed_fault else f"packed by {cut.attention or 'its own attention'}"
    return {"rows": layout, "layers": cut.pattern.layers, "cpu_s": round(time.process_time() - start_s, 2)}


def proven_apart(family: str, limit_s: float) -> dict[str, Any]:
    """The same by a process of its own, which may take long or end."""
    forks = multiprocessing.get_context("fork")
    ours, theirs = forks.Pipe(duplex=False)
    process = forks.Process(target=_answer, args=(family, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if ours.poll(limit_s):
            return dict(ours.recv())
        return {"refused": f"not proven within {limit_s:g} s"}
    except EOFError:
        process.join(10)
        return {"refused": f"its process ended by itself ({process.exitcode})"}
    finally:
        process.kill()
        process.join()


def _answer(family: str, to: Connection) -> None:
    to.send(proven(family))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    parser.add_argument("--limit-s", type=float, default=300, help="seconds for a family")
    parser.add_argument("--output", type=Path, default=RESULTS / "causal_families.json")
    parser.add_argument("--machine", default="")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    proven("llama")  # so that each family's process begins with what all of them import
    results: dict[str, Any] = {}
    if args.output.exists():
        results = json.loads(args.output.read_text())["families"]
    for family in args.families:
        results[family] = proven_apart(family, args.limit_s)
        print(family, results[family], flush=True)
        result = {**provenance(args.machine), "transformers": transformers.__version__, "families": results}
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    rows = [one.get("rows", "refused").split()[0] for one in results.values()]
    print(", ".join(f"{rows.count(kind)} {kind}" for kind in ("packed", "padded", "refused")))


if __name__ == "__main__":
    main()

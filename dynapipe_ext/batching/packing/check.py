"""Proof that a transformers model treats packed documents as if each were alone.

Two small forwards of the model itself, and two of a small twin: the same class and attention with few narrow layers,
whose windows, chunks and rotary lengths are so short that the twin's documents reach across them.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dynapipe_ext.batch.document_attention import DOCUMENT_ATTENTION
from dynapipe_ext.batching.packing.collator import PackingCollator
from dynapipe_ext.errors import ConfigError, ExecutionError, check_integer
from dynapipe_ext.evaluating import evaluating
from dynapipe_ext.models.named_models import changing_lengths, shorten

_SHORT = 4  # positions of the twin's windows, chunks and rotary lengths
_TWIN_DOCUMENTS = (3, 13, 5, 6)  # short ones before and behind one that crosses every limit, at no multiple of it
_TWIN_VOCABULARY = 96
_MOST_LAYERS = 12


def check_packing(
    model: Any, collator: PackingCollator, *, longest: int | None = None, tolerance: float = 1e-4
) -> float:
    """Largest difference of logits, packed against one by one, relative to the largest logit.

    Call it once with the model to be trained. `longest`: positions of the longest document (default: any length, so
    every sliding window, chunk and rotary length of the model is crossed; the row length of the collator limits what
    depends on rows). `tolerance` suits float32; take 2e-2 for bfloat16.

    Errors: ExecutionError for a model whose attention or positions depend on what else is in the row; ConfigError for
    one that cannot run packed rows, or of which no small twin can be built.
    """
    if longest is not None:
        check_integer("longest", longest, least=1)
    vocabulary = int(model.config.get_text_config().vocab_size)
    error = _difference(model, collator, _documents((5, 8), vocabulary))
    _refuse(model, collator, error, tolerance, "")
    for limit, value in changing_lengths(model.config, longest=longest, row=collator.max_tokens).items():
        twin = _twin(model, limit, _attention_of(model))
        plain = twin
        if _attention_of(model) == DOCUMENT_ATTENTION:  # it knows no rows without borders: held against another kernel
            plain = _twin(model, limit, "sdpa")
        difference = _difference(twin, collator, _documents(_TWIN_DOCUMENTS, _TWIN_VOCABULARY), plain)
        _refuse(model, collator, difference, tolerance, f" where documents exceed its {limit} of {value}")
        error = max(error, difference)
    return error


def _refuse(model: Any, collator: PackingCollator, error: float, tolerance: float, where: str) -> None:
    if not error <= tolerance:
        raise ExecutionError(
            f"packed logits of {type(model).__name__} differ from those of single documents by {error:.2g} of the"
            f' largest (allowed {tolerance:.2g}){where}: with attention="{collator.attention}" under'
            f" {_attention_of(model)} documents are not apart; try"
            ' attn_implementation="sdpa" with attention="positions", or register_document_attention() with'
            ' attention="cu_seqlens", or keep documents (and, for scale by position, rows) within that length'
        )


def _attention_of(model: Any) -> str:
    return str(getattr(model.config, "_attn_implementation", None))


def _documents(lengths: Sequence[int], vocabulary: int) -> list[dict[str, Any]]:
    return [{"input_ids": [(7 * i + 11 * n + 3) % vocabulary for i in range(n)]} for n in lengths]


def _difference(
    model: Any, collator: PackingCollator, documents: Sequence[Mapping[str, Any]], plain: Any = None
) -> float:
    """Of logits in one row against one by one, relative to the largest; `plain` (default: the model, under its own
    attention) runs single documents as anybody would. Errors: ConfigError for what cannot run."""
    import torch

    one_row = PackingCollator(attention=collator.attention)
    packed = one_row.pack(documents)
    bordered = plain is None and _attention_of(model) == DOCUMENT_ATTENTION
    plain = plain or model

    def logits(model: Any, arguments: Mapping[str, Any]) -> Any:
        placed = {name: value.to(model.device) if hasattr(value, "to") else value for name, value in arguments.items()}
        try:
            return model(**{**placed, "labels": None}).logits.float()
        except (ConfigError, ExecutionError):
            raise
        except Exception as error:
            raise ConfigError(
                f"{type(model).__name__} cannot run packed rows ({type(error).__name__}: {error}): it takes no"
                f' position_ids or not what attention="{collator.attention}" gives; pad its batches instead'
            ) from error

    with evaluating(model, plain), torch.no_grad():
        together = packed.unpack(logits(model, one_row.model_inputs(packed)))
        inputs = [one_row([document]) for document in documents]
        if not bordered:
            inputs = [{"input_ids": one["input_ids"], "use_cache": False} for one in inputs]
        alone = [logits(plain, one)[0] for one in inputs]
    largest = max(float(x.abs().max()) for x in alone)
    furthest = max(float((a - b[: len(a)]).abs().max()) for a, b in zip(together, alone, strict=True))
    return furthest / max(largest, 1e-30)


def _twin(model: Any, limit: str, attention: str) -> Any:
    """A small model of the same kind whose `limit` is `_SHORT` positions. Errors: ConfigError where there is none."""
    import torch

    config = _twin_config(model.config.get_text_config(), limit)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            if model.config.get_text_config() is model.config:
                twin = type(model)._from_config(config, attn_implementation=attention)
            else:  # the text part of a model of several kinds of input
                auto = importlib.import_module("transformers").AutoModelForCausalLM
                twin = auto.from_config(config, attn_implementation=attention)
            with torch.no_grad():
                for parameter in twin.parameters():
                    if parameter.dim() >= 2:  # well away from zero: attention then shows in the logits
                        parameter.normal_(0.0, 1.0 / math.sqrt(parameter.shape[-1]))
    except Exception as error:
        raise ConfigError(
            f"no small {type(model).__name__} with a {limit} of {_SHORT} can be built ({type(error).__name__}:"
            f" {error}), so its packing cannot be proven for longer documents: pass longest= if yours are shorter"
        ) from error
    return twin.to(device=model.device, dtype=model.dtype)


def _twin_config(config: Any, limit: str) -> Any:
    twin = copy.deepcopy(config)
    kinds = list(getattr(twin, "layer_types", None) or ())
    num_layers = 2
    if kinds:  # the first layers that have all kinds
        num_layers = next(n for n in range(1, len(kinds) + 1) if set(kinds[:n]) == set(kinds))
        num_layers = min(max(2, num_layers), len(kinds), _MOST_LAYERS)
        twin.layer_types = kinds[:num_layers]
    twin.num_hidden_layers = num_layers
    twin.vocab_size = _TWIN_VOCABULARY
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(twin, name, None) is not None:
            setattr(twin, name, 0)
    heads, groups = twin.num_attention_heads, getattr(twin, "num_key_value_heads", None)
    head_dim = getattr(twin, "head_dim", None) or twin.hidden_size // heads
    fewer = min(groups or heads, 2)
    if groups:
        twin.num_key_value_heads = fewer
    twin.num_attention_heads = fewer * (2 if groups and heads > groups else 1)
    twin.hidden_size = twin.num_attention_heads * head_dim
    for name in ("intermediate_size", "intermediate_size_mlp"):
        if getattr(twin, name, None):
            setattr(twin, name, 64)
    shorten(twin, limit, _SHORT)
    return twin

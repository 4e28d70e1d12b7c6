"""Measured peaks of a transformers model over batches of chosen shapes, on the device it is on."""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynapipe_ext.batching.inference.memory_records import MeasuredOn, MemoryRecord, RecordFile
from dynapipe_ext.batching.inference.memory_shapes import Choice, ShapeLimits, next_memory_shape
from dynapipe_ext.errors import ConfigError, DataError
from dynapipe_ext.peak_memory import is_out_of_memory, measure_on

# Of a config, what changes no shape of any tensor: names, versions, labels, special tokens, how weights are drawn.
_NO_SIZES = (
    "transformers_version", "architectures", "dtype", "torch_dtype", "id2label", "label2id", "problem_type",
    "_name_or_path", "return_dict", "chunk_size_feed_forward", "task_specific_params", "prefix",
)  # fmt: skip
_NO_SIZES_PARTS = ("token_id", "initializer", "dropout", "pdrop")


def beams_of(model: Any, generation: Mapping[str, Any]) -> int:
    """Sequences that `model.generate` keeps for each text."""
    return int(generation.get("num_beams") or of_generation(model, generation, "num_beams") or 1)


def of_generation(model: Any, generation: Mapping[str, Any], name: str) -> Any:
    """A setting of the configuration that `model.generate` follows: of the one that is passed, where that has it, else
    of the model's."""
    passed = getattr(generation.get("generation_config"), name, None)
    return getattr(model.generation_config, name, None) if passed is None else passed


def measured_on(model: Any, *, max_new_tokens: int, num_beams: int) -> MeasuredOn:
    """What a peak measured now is measured with."""
    device = model.device
    return MeasuredOn(
        model=f"{model.config.model_type}, {sum(p.numel() for p in model.parameters())} parameters",
        fingerprint=hashlib.sha256(json.dumps(_sizes(model.config.to_dict()), sort_keys=True).encode()).hexdigest(),
        dtype=str(model.dtype).removeprefix("torch."),
        attention=str(getattr(model.config, "_attn_implementation", None) or "unknown"),
        device=device.type,
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() or "unknown",
        max_new_tokens=max_new_tokens,
        num_beams=num_beams,
        torch=torch.__version__,
        transformers=importlib.metadata.version("transformers"),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _sizes(value: Any) -> Any:
    """The part of a config's dictionary that decides about memory, as JSON."""
    if isinstance(value, Mapping):
        sizes = {str(k): v for k, v in value.items() if k not in _NO_SIZES and not any(p in k for p in _NO_SIZES_PARTS)}
        return {name: _sizes(one) for name, one in sizes.items()}
    if isinstance(value, list | tuple):
        return [_sizes(one) for one in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def load_model(path: str | Path, *, device: str | None = None, dtype: str | None = None) -> Any:
    """The causal or encoder-decoder model of a folder, or of a config's file, ready for inference.

    On `device`, by default cuda where there is one; in `dtype`, by default the model's own.

    Weights are read from safetensors in the folder; where there are none they are drawn at random, which changes no
    peak. No code that comes with a model is run. Errors: ConfigError, DataError.
    """
    import transformers
    from safetensors import SafetensorError

    place = Path(path)
    weights = place.is_dir() and any(place.glob("*.safetensors"))
    if not (place / "config.json" if place.is_dir() else place).is_file():
        raise DataError(f"{place} is no folder with a config.json and no config's file: name one of these")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch finds none here: give cpu, or install torch for this GPU")
    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        config: Any = transformers.AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
        kind: Any = transformers.AutoModelForCausalLM
        if getattr(config, "is_encoder_decoder", False):
            kind = transformers.AutoModelForSeq2SeqLM
        if weights:
            model = kind.from_pretrained(
                place, dtype=dtype or "auto", local_files_only=True, use_safetensors=True, trust_remote_code=False
            )
        else:
            model = kind.from_config(config, dtype=dtype or getattr(config, "dtype", None) or "float32")
        return model.to(device).eval()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, SafetensorError) as error:
        raise DataError(f"{place} cannot be loaded ({error}): name a causal or encoder-decoder model") from error
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise ConfigError(f"{place} does not fit in the memory of {device}: choose a smaller model") from error
        raise DataError(f"{place} cannot be loaded ({error}): name a model whose weights fit its config") from error


def longest_prompt(model: Any, max_new_tokens: int) -> int | None:
    """Tokens of the longest prompt that the model has positions for; None where the config names no bound."""
    text = model.config.get_text_config(decoder=True)
    bound = getattr(text, "max_position_embeddings", None)
    if bound is None:
        return None
    return int(bound) if model.config.is_encoder_decoder else int(bound) - max_new_tokens


def check_lengths(model: Any, limits: ShapeLimits, max_new_tokens: int) -> None:
    """Errors: ConfigError for lengths that the model cannot take."""
    if max_new_tokens < 0 or (model.config.is_encoder_decoder and max_new_tokens < 1):
        raise ConfigError(
            f"{max_new_tokens} new tokens cannot be made: give 1 or more, or 0 with a causal model for one forward pass"
        )
    most = longest_prompt(model, max_new_tokens)
    if most is not None and limits.max_length > most:
        move = f"lower max_length to {most} or less, or generate fewer" if most > 0 else "generate fewer"
        positions = most + (0 if model.config.is_encoder_decoder else max_new_tokens)
        raise ConfigError(
            f"prompts of {limits.max_length} tokens and {max_new_tokens} new ones are more than the {positions:,}"
            f" positions of the model: {move}"
        )


def collect(
    model: Any,
    file: RecordFile,
    limits: ShapeLimits,
    *,
    choice: Choice,
    max_new_tokens: int,
    num_beams: int,
    seed: int = 0,
    memory_limit_bytes: int | None = None,
    on_record: Callable[[MemoryRecord], None] = lambda record: None,
) -> None:
    """Measure batches into `file` until the allowance is used up or no shape is left.

    All texts make `max_new_tokens` tokens, whatever they say. A batch that runs out of memory is a record, too; with
    `memory_limit_bytes` so is one whose measured peak is above that.
    """
    check_lengths(model, limits, max_new_tokens)
    measure = measure_on(model.device)
    run = functools.partial(_run, model, max_new_tokens=max_new_tokens, num_beams=num_beams)
    run(_batch(model, (1, min(4, limits.max_length)), seed))  # libraries' own first allocations belong to no batch
    done = {record.shape: record.peak_bytes is None for record in file.records}
    while (shape := next_memory_shape(done, limits, choice, seed)) is not None:
        inputs = _batch(model, shape, seed)
        available = _available_bytes(model.device)
        peak = None
        try:
            _, peak = measure(functools.partial(run, inputs))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        if peak is None and model.device.type == "cuda":
            torch.cuda.empty_cache()
        limit = available if memory_limit_bytes is None else min(available, memory_limit_bytes)
        lost = peak is None or (memory_limit_bytes is not None and peak > memory_limit_bytes)
        record = MemoryRecord(
            rows=shape[0],
            longest=shape[1],
            tokens=int(inputs["attention_mask"].sum()),
            peak_bytes=None if lost or peak is None else max(1, peak),
            limit_bytes=max(1, limit) if lost else None,
        )
        file.append(record)
        done[shape] = lost
        on_record(record)


def _batch(model: Any, shape: tuple[int, int], seed: int) -> dict[str, torch.Tensor]:
    """A batch of random tokens: one text has all of the length, the others some share of it; at times all have."""
    rows, longest = shape
    generator = np.random.default_rng((seed, rows, longest))
    fewest = max(1, min(longest, round(longest * generator.uniform(0.5, 1.1))))
    lengths = np.array([longest, *generator.integers(fewest, longest + 1, rows - 1)])
    real = np.arange(longest)[None, :] < lengths[:, None]
    if not model.config.is_encoder_decoder:
        real = real[:, ::-1]  # prompts end where new tokens begin
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
    tokens = generator.integers(0, vocabulary, (rows, longest))
    return {
        "input_ids": torch.from_numpy(tokens).to(model.device),
        "attention_mask": torch.from_numpy(real.astype(np.int64)).to(model.device),
    }


def _run(model: Any, inputs: dict[str, torch.Tensor], *, max_new_tokens: int, num_beams: int) -> None:
    """One batch, with nothing of it kept; its inputs are there already, and no part of a peak."""
    with torch.inference_mode():
        if not max_new_tokens:
            model(**inputs)
            return
        vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
        pad = model.generation_config.pad_token_id
        model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            num_beams=num_beams,
            eos_token_id=vocabulary,  # which no text makes: none ends early
            pad_token_id=0 if pad is None else pad,
        )


def _available_bytes(device: torch.device) -> int:
    """Bytes that a batch can have."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

"""The call into each kernel of packed attention: by the signatures of its versions, and by what its arguments mean."""

from __future__ import annotations

import ast
import importlib.metadata
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dynapipe_ext.batch import packed_attention as kernels
from dynapipe_ext.batch.packed_attention import (
    KERNELS,
    DocumentMask,
    DocumentOffsets,
    attend_by_kernel,
    attend_documents,
    load_kernel,
)
from dynapipe_ext.launch.commands import doctor
from tests.support.documents import LENGTHS, by_definition, packed_tensors

# As the sources of each version state them; where a package is installed, its own sources are read instead.
SIGNATURES = {
    ("flash-attn-2", "2.8"): (
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,"
        " causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,"
        " return_attn_probs=False, block_table=None"
    ),
    ("flash-attn-3", "3.0.0b1"): (
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,"
        " softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,"
        " window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,"
        " sm_margin=0, return_attn_probs=False"
    ),
    ("flash-attn-4", "4.0.0b36"): (
        "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,"
        " min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None,"
        " softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1,"
        " pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None,"
        " block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, scheduler_metadata=None,"
        " seqlen_k_per_split=None, disable_scheduler_metadata=False, gather_bwd_recompute_p=False,"
        " gather_bwd_token_chunk=None"
    ),
    ("torch-varlen", "2.11"): (
        "query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)"
    ),
    ("torch-varlen", "2.13"): (
        "query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),"
        " enable_gqa=False, seqused_k=None, block_table=None, num_splits=None"
    ),
}
OLDER = {
    ("flash-attn-2", "2.5"): SIGNATURES["flash-attn-2", "2.8"].replace(" softcap=0.0,", ""),
    ("torch-varlen", "2.10"): "query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None",
}
RULES = {
    "causal": DocumentMask(),
    "window": DocumentMask(window=4, scale=0.3),
    "both ways": DocumentMask(is_causal=False),
    "window both ways": DocumentMask(is_causal=False, window=3),
    "capped": DocumentMask(softcap=1.5),
}


def kernel_of(name: str) -> kernels.VarlenKernel:
    return next(kernel for kernel in KERNELS if kernel.name == name)


def install(name: str, signature: str, monkeypatch: pytest.MonkeyPatch) -> kernels.VarlenKernel:
    """A module in the kernel's place whose function has this signature and does what the package says."""
    kernel = kernel_of(name)
    namespace: dict[str, Any] = {"meant": meant_by_torch if name == "torch-varlen" else meant_by_flash_attn}
    exec(f"def {kernel.function}({signature}):\n    return meant(dict(locals()))", namespace)
    parents = kernel.module.split(".")
    for depth in range(1, len(parents) + 1):
        module = ModuleType(".".join(parents[:depth]))
        module.__path__ = []
        if module.__name__ == kernel.module:
            setattr(module, kernel.function, namespace[kernel.function])
        if not module.__name__.startswith("torch") or module.__name__ == kernel.module:
            monkeypatch.setitem(sys.modules, module.__name__, module)
    kernels._load_once.cache_clear()
    return kernel


@pytest.fixture(autouse=True)
def forget_what_was_loaded():
    yield
    kernels._load_once.cache_clear()


def meant_by_flash_attn(given: dict[str, Any]) -> Any:
    """flash-attn's documentation: a window is (left, right), inclusive, without bounds below 0 or as None; `causal` is
    a bound of 0 on the right."""
    left, right = (math.inf if side is None or side < 0 else side for side in given["window_size"])
    right = 0 if given["causal"] else right
    assert given["cu_seqlens_q"].dtype == torch.int32
    assert given["max_seqlen_q"] == given["max_seqlen_k"] == max(LENGTHS)
    out = by_definition(
        given["q"],
        given["k"],
        given["v"],
        given["cu_seqlens_k"].tolist(),
        scale=given["softmax_scale"],
        back=left,
        ahead=right,
        softcap=given["softcap"],
    )
    return (out, None) if "return_lse" in given else out  # version 4 gives the sums of the softmax as well


def meant_by_torch(given: dict[str, Any]) -> torch.Tensor:
    left, right = (math.inf if side < 0 else side for side in given["window_size"])
    if "enable_gqa" in given:
        assert given["enable_gqa"] == (given["query"].shape[1] != given["key"].shape[1])
    assert given["max_q"] == given["max_k"] == max(LENGTHS)
    tensors = (given["query"], given["key"], given["value"], given["cu_seq_k"].tolist())
    return by_definition(*tensors, scale=given["scale"], back=left, ahead=right)


def expected(tensors: list[torch.Tensor], borders: DocumentOffsets, rule: DocumentMask) -> torch.Tensor:
    back = math.inf if rule.window is None else rule.window - 1
    ahead = 0 if rule.is_causal else back
    places = borders.sums.tolist()
    return by_definition(*tensors[:3], places, scale=rule.scale, back=back, ahead=ahead, softcap=rule.softcap)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(("name", "version"), SIGNATURES)
def test_each_kernel_is_asked_for_what_the_rule_says(name, version, rule, monkeypatch):
    kernel = install(name, SIGNATURES[name, version], monkeypatch)
    if rule.softcap and "softcap" not in kernel.arguments:
        pytest.skip("pick_kernel does not give it such a rule")
    for heads, groups in ((4, 4), (4, 2)):
        tensors = packed_tensors(heads, groups)
        borders = DocumentOffsets.of(LENGTHS, torch.device("cpu"))
        torch.testing.assert_close(
            attend_by_kernel(kernel, *tensors[:3], borders, rule), expected(tensors, borders, rule)
        )


@pytest.mark.parametrize(("name", "version"), OLDER)
def test_a_version_that_lacks_an_argument_is_left_out_and_named(name, version, monkeypatch):
    kernel = install(name, OLDER[name, version], monkeypatch)
    function, reason = load_kernel(kernel)
    assert function is None
    assert reason.startswith("has no ")


def test_flash_attn_4_alone_does_not_make_flash_attn_2_a_broken_package(monkeypatch):
    install("flash-attn-4", SIGNATURES["flash-attn-4", "4.0.0b36"], monkeypatch)
    assert load_kernel(kernel_of("flash-attn-2")) == (None, "")


@pytest.mark.parametrize(
    ("major", "installed", "lacks"),
    [(9, "", True), (9, "flash-attn-4", False), (8, "", False), (7, "", False), (10, "flash-attn-2", True)],
)
def test_doctor_names_the_kernels_that_a_gpu_was_made_for(major, installed, lacks, monkeypatch):
    if installed:
        install(installed, next(s for (name, _), s in SIGNATURES.items() if name == installed), monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, 0))
    monkeypatch.setattr(doctor, "_is_cpu_build", lambda: False)
    assert kernels.lacks_newer_kernels() == lacks
    assert ("flash-attn-4" in doctor._attention().hint) == lacks


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_the_sources_that_are_installed_have_the_arguments(kernel):
    try:
        files = importlib.metadata.files({"torch-varlen": "torch"}.get(kernel.name, kernel.name.removesuffix("-2")))
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{kernel.name} is not installed")
    folder = kernel.module.replace(".", "/")
    sources = [Path(str(f.locate())) for f in files or () if str(f).startswith(folder) and str(f).endswith(".py")]
    found = [
        {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
        for source in sources
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == kernel.function
    ]
    assert any(names >= {*kernel.arguments.values()} - {"enable_gqa"} for names in found), found


@pytest.mark.parametrize("name", ["causal", "window", "both ways", "window both ways"])
def test_a_call_a_document_gives_values_and_gradients_of_the_definition(name):
    rule = RULES[name]
    tensors = packed_tensors(4, 2)
    borders = DocumentOffsets.of(LENGTHS, torch.device("cpu"))
    values = attend_documents(*tensors[:3], borders, rule), expected(tensors, borders, rule)
    mine, theirs = ((out, *torch.autograd.grad((out * tensors[3]).sum(), tensors[:3])) for out in values)
    for found, wanted in zip(mine, theirs, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)

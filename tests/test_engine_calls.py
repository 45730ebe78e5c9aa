"""The recorded calls of vLLM and SGLang bind to our functions, and the engines' own functions give what ours give."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kda_layers.engines import sglang, sglang_kernel, vllm
from kda_layers.testing.budgets import error
from tests import test_engines as sites
from tests.engine_wheels import wheel
from tests.test_engines import Layer
from tools import engine_calls
from tools.engine_calls import Call

RECORDS = sorted(engine_calls.RECORDS.iterdir())
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_recorded_calls_bind_to_our_functions(record: Path) -> None:
    engine, version, calls = engine_calls.from_text(record.read_text())
    assert record.stem == f"{engine}-{version}"
    assert version == engine_calls.PLUGINS[engine].TESTED
    assert [engine_calls.serving(engine, call.calls) for call in calls] == [call.served_by for call in calls]
    assert engine_calls.problems(engine, calls) == []
    if engine == "vllm":
        assert {call.file.removesuffix(".py").replace("/", ".") for call in calls} >= set(vllm.LAYERS)
        functions = {f"{module}.{name}" for module, names in vllm.FUNCTIONS.items() for name in names}
        assert {call.calls for call in calls if call.served_by} == functions, "each is called by a layer"


def test_both_engines_have_a_record() -> None:
    assert [path.stem for path in RECORDS] == [f"sglang-{sglang.TESTED}", f"vllm-{vllm.TESTED}"]


def test_calls_that_do_not_bind_or_are_not_replaced_are_found() -> None:
    call = Call("a.py", "f", f"{vllm.LING}.chunk_kda", 0, ["**", "new_option"], "chunk", None)
    positional = Call("a.py", "f", f"{vllm.LING}.chunk_kda", 5, ["**"], "chunk", None)
    other = Call("a.py", "f", f"{vllm.LING}.chunk_kda_2", 5, [], None, None)
    assert engine_calls.problems("vllm", [call, positional, other]) == [
        f"TypeError a.py, f: {vllm.LING}.chunk_kda: got an unexpected keyword argument 'new_option'",
        f"TypeError a.py, f: {vllm.LING}.chunk_kda: too many positional arguments",
        f"NOT REPLACED a.py, f: {vllm.LING}.chunk_kda_2",
    ]
    call = Call("a.py", "f", "TritonKDAKernel.decode", 6, ["**"], "decode", None)
    assert engine_calls.problems("sglang", [call]) == [
        "TypeError a.py, f: TritonKDAKernel.decode: too many positional arguments"
    ]


def test_calls_are_read_from_a_wheel(tmp_path: Path) -> None:
    """Aliases, imports within functions, nested functions; not what other files or other hardware call."""
    layer = f"from {vllm.LING} import FusedRMSNormGated, chunk_kda as ck\nclass A:\n  def f(self):\n"
    layer += f"    from {vllm.LING}.sub import fused_recurrent_kda\n    def g(): return ck(1, 2, beta=3)\n"
    layer += "    fused_recurrent_kda(**{}); FusedRMSNormGated(); self.new_kda_kernel(); self.is_kda_layer()\n"
    for name in ("vllm/model_executor/models/bailing_moe_v3.py", "vllm/models/amd/kda.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(layer)
    (tmp_path / "vllm/other.py").write_text("other_kda_kernel()")
    file = "vllm/model_executor/models/bailing_moe_v3.py"
    calls = [
        Call(file, "A.f", "new_kda_kernel", 0, [], None, None),
        Call(file, "A.f", f"{vllm.LING}.fused_recurrent_kda", 0, ["**"], "recurrent", None),
        Call(file, "A.f.g", f"{vllm.LING}.chunk_kda", 2, ["beta"], "chunk", None),
    ]
    assert engine_calls.find(tmp_path, "vllm") == calls
    assert engine_calls.from_text(engine_calls.to_text("vllm", "1.0", calls)) == ("vllm", "1.0", calls)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_record_is_that_of_the_wheel(engine: str) -> None:
    command = [sys.executable, "-m", "tools.engine_calls", str(wheel(engine))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


# ---------------------------------------------------------------- the engines' own functions

LENGTHS = (70, 3)
ONE_TOKEN = (1, 1)
DRAFTS = (3, 2)


def vllm_calls() -> list[tuple[str, dict[str, Any]]]:
    """A call of every function that we replace, with each gate."""
    calls = []
    for bound in (None, -5.0):
        x, one, drafts = (Layer("cpu", bound, lengths) for lengths in (LENGTHS, ONE_TOKEN, DRAFTS))
        calls += [sites.kimi_prefill(x), sites.glm_prefill(x), sites.ling_prefill(x)]
        pools = [torch.nan_to_num(one.pool()) for _ in range(3)]
        decode = sites.kimi_decode, sites.glm_decode, sites.ling_decode
        # GLM's gate is always bounded where the kernel computes it.
        calls += [f(one, pool) for f, pool in zip(decode, pools, strict=True) if bound or f is not sites.glm_decode]
        slots = torch.tensor([[4, 5, 6], [2, 3, 8]], dtype=torch.int32)
        accepted = torch.ones(2, dtype=torch.int32)
        calls.append(sites.ling_drafts(drafts, torch.nan_to_num(drafts.pool()), slots, accepted))
        q, k, v = drafts.qkv
        arguments = dict(
            q=q, k=k, v=v, raw_g=drafts.raw_g, raw_beta=drafts.raw_beta, A_log=drafts.A_log, dt_bias=drafts.dt_bias,
            lower_bound=bound, initial_state=torch.nan_to_num(drafts.pool()), cu_seqlens=drafts.offsets,
            ssm_state_indices=slots, num_accepted_tokens=accepted, out=None,
        )  # fmt: skip
        calls.append((f"{vllm.KIMI}.fused_recurrent_kda", arguments))
    return calls


def sglang_calls() -> list[tuple[str, dict[str, Any]]]:
    """Decoding and verification; Triton's interpreter does not run the kernels of SGLang's prefill (block pointers)."""
    calls = []
    for bound in (None, -5.0):
        x = Layer("cpu", bound, ONE_TOKEN)
        q, k, v = x.qkv
        common = dict(A_log=x.A_log, dt_bias=x.dt_bias, cache_indices=sites.slots_of(x), lower_bound=bound)
        packed = dict(
            mixed_qkv=x.mixed_qkv, a=x.raw_g.flatten(2), b=x.raw_beta, scale=q.shape[3] ** -0.5, num_v_heads=x.H,
            head_v_dim=q.shape[3],
        )  # fmt: skip
        apart = dict(q=q, k=k, v=v, a=x.raw_g, b=x.raw_beta, query_start_loc=x.offsets)
        for name, own in (("packed_decode", packed), ("decode", apart)):
            calls.append((f"{sglang.CLASS}.{name}", own | common | {"ssm_states": torch.nan_to_num(x.pool())}))
        x, rows = Layer("cpu", bound, DRAFTS), torch.tensor([1, 0], dtype=torch.int32)
        buffer = torch.zeros(2, max(DRAFTS), x.H, sites.D, sites.D)
        verify = sites.sglang_verify(x, torch.nan_to_num(x.pool()), buffer, sites.slots_of(x), rows)
        calls.append((f"{sglang.CLASS}.target_verify", verify))
    return calls


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_engines_own_functions_give_what_ours_give(engine: str, tmp_path: Path) -> None:
    """In fp32 by Triton's interpreter: outputs, returned states and pools."""
    calls = vllm_calls() if engine == "vllm" else sglang_calls()
    given, results = tmp_path / "calls.pt", tmp_path / "results.pt"
    torch.save(calls, given)
    command = [sys.executable, "-m", "tests.stock_engines", str(wheel(engine)), str(given), str(results)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for (target, arguments), (returned, written) in zip(calls, torch.load(results, weights_only=True), strict=True):
        if engine == "vllm":
            ours = sites.vllm_function(target)
        else:
            ours = getattr(sglang_kernel.kernel(sites.Stock)(), target.rpartition(".")[2])
        for got, theirs in zip(tensors_of(ours(**arguments)), tensors_of(returned), strict=True):
            assert error(got, theirs) < 2e-6, target
        for name in ("initial_state", "ssm_states", "intermediate_states_buffer"):
            if name in arguments:
                assert error(arguments[name], written[name]) < 2e-6, (target, name)


def sglang_steps() -> list[dict[str, Any]]:
    """Decoding, a prefill of fresh sequences, and chains of drafts, which leave the pool's states as they are."""
    calls = []
    for bound, (step, lengths) in itertools.product(
        (None, -5.0), (("decode", (1, 1)), ("extend", LENGTHS), ("verify", (2, 2)), ("verify", DRAFTS))
    ):
        x, T = Layer("cpu", bound, lengths), max(lengths)
        generator = torch.Generator().manual_seed(1)
        channels, kept = x.mixed_qkv.shape[1], {}
        conv = torch.randn(9, 3, channels, generator=generator) * (step != "extend")
        if step == "verify":
            kept = dict(
                kept_states=torch.zeros(2, T, x.H, sites.D, sites.D), kept_windows=torch.zeros(2, T, 3, channels),
                ragged=min(lengths) < T,
            )  # fmt: skip
        calls.append(
            dict(
                step=step, mixed_qkv=x.mixed_qkv, a=x.raw_g[0].flatten(1), b=x.raw_beta[0], conv=conv,
                states=torch.nan_to_num(x.pool()), slots=sites.slots_of(x), offsets=x.offsets, A_log=x.A_log,
                weight=torch.randn(channels, 4, generator=generator) / 2, dt_bias=x.dt_bias, bound=bound, **kept,
            )
        )  # fmt: skip
    return calls


def test_sglangs_backend_gives_what_it_gives_with_ours(tmp_path: Path) -> None:
    """SGLang's own attention backend around its kernel class, and around ours: outputs and every pool."""
    calls = sglang_steps()
    given, results = tmp_path / "calls.pt", tmp_path / "results.pt"
    torch.save(calls, given)
    command = [sys.executable, "-m", "tests.stock_sglang", str(wheel("sglang")), str(given), str(results)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for call, (stock, ours) in zip(calls, torch.load(results, weights_only=True), strict=True):
        (want, theirs), (got, mine) = stock, ours
        assert error(got, want) < 2e-6, call["step"]
        written = {n for n, t in mine.items() if isinstance(t, Tensor) and not torch.equal(t, call[n])}
        states = {"kept_states", "kept_windows"} if call["step"] == "verify" else {"states"}
        assert written == {"conv", *states}
        for name in written:
            assert error(mine[name], theirs[name]) < 2e-6, (call["step"], name)


def tensors_of(returned: Any) -> list[Tensor]:
    return [returned] if isinstance(returned, Tensor) else list(returned)

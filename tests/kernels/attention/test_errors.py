"""Every way to call `biased_attention` wrongly: the message names the argument, what was expected and what came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kda_layers.kernels import biased_attention
from kda_layers.kernels.kda.checks import DtypeError  # a TypeError and a ValueError
from tests.kernels.attention.cases import BiasedCase, call, make_inputs
from tests.kernels.cases import BF16, FP16, FP32, FP64

Arguments = dict[str, Any]


def arguments() -> Arguments:
    """B = 2, T = 5, S = 7, H = 4, H_kv = 2, D = 4."""
    x = make_inputs(BiasedCase(B=2, T=5, S=7, H_kv=2, group=2, D=4, dtype=FP32))
    return dict(q=x.q, k=x.k, v=x.v, bias=x.bias)


def bias(*shape: int) -> Callable[[Arguments], Arguments]:
    return lambda a: {"bias": torch.zeros(shape)}


def cut(name: str, dim: int, size: int) -> Callable[[Arguments], Arguments]:
    return lambda a: {name: a[name].narrow(dim, 0, size)}


def cast(name: str, dtype: torch.dtype) -> Callable[[Arguments], Arguments]:
    return lambda a: {name: a[name].to(dtype)}


def give(**values: Any) -> Callable[[Arguments], Arguments]:
    return lambda a: values


def keys(change: Callable[[Tensor], Tensor]) -> Callable[[Arguments], Arguments]:
    return lambda a: {n: change(a[n]) for n in ("k", "v")}


def everything(change: Callable[[Tensor], Tensor]) -> Callable[[Arguments], Arguments]:
    return lambda a: {n: change(t) for n, t in a.items()}


def packed(*offsets: int, **more: Any) -> Callable[[Arguments], Arguments]:
    return lambda a: {
        **{n: torch.zeros(1, 5, 2, 4) for n in ("q", "k", "v")}, "bias": None,
        "cu_seqlens": torch.tensor(offsets, dtype=torch.int32), **more,
    }  # fmt: skip


FORMS = r"bias must have shape \[1\|B, 1\|H_kv\|H, 1\|T, S\] = \[1 or 2, 1 or 2 or 4, 1 or 5, 7\], got "
DTYPE = r" must be float32 with q of float32, got \S*"

BAD: list[tuple[str, Callable[[Arguments], Arguments], type[Exception], str]] = [
    ("q no tensor", give(q=[1.0]), TypeError, r"q must be a torch.Tensor, got list"),
    ("v no tensor", give(v=None), TypeError, r"v must be a torch.Tensor, got NoneType"),
    ("bias no tensor", give(bias=0.5), TypeError, r"bias must be a torch.Tensor, got float"),
    ("q rank", lambda a: {"q": a["q"][0]}, ValueError, r"q must have 4 dimensions, got shape \(5, 4, 4\)"),
    ("k rank", lambda a: {"k": a["k"][0]}, ValueError, r"k must have 4 dimensions, got shape \(7, 2, 4\)"),
    ("k batch", keys(lambda t: t[:1]), ValueError, r"k must have shape \[2, 7, 2, 4\], got \[1, 7, 2, 4\]"),
    ("k width", cut("k", 3, 3), ValueError, r"k must have shape \[2, 7, 2, 4\], got \[2, 7, 2, 3\]"),
    ("v tokens", cut("v", 1, 6), ValueError, r"v must have shape \[2, 7, 2, 4\], got \[2, 6, 2, 4\]"),
    ("v heads", cut("v", 2, 1), ValueError, r"v must have shape \[2, 7, 2, 4\], got \[2, 7, 1, 4\]"),
    ("heads", cut("q", 2, 3), ValueError, r"q's 3 heads must be a multiple of k's 2 heads"),
    ("fewer heads", cut("q", 2, 1), ValueError, r"q's 1 heads must be a multiple of k's 2 heads"),
    ("no heads", cut("q", 2, 0), ValueError, r"H must be at least 1, got 0"),
    ("no key heads", keys(lambda t: t[:, :, :0]), ValueError, r"H_kv must be at least 1, got 0"),
    ("no width", lambda a: {n: a[n][..., :0] for n in "qkv"}, ValueError, r"D must be at least 1, got 0"),
    ("k dtype", cast("k", BF16), DtypeError, r"k" + DTYPE + "bfloat16"),
    ("v dtype", cast("v", FP64), DtypeError, r"v" + DTYPE + "float64"),
    ("bias dtype", cast("bias", FP16), DtypeError, r"bias" + DTYPE + "float16"),
    ("bias integer", cast("bias", torch.int64), DtypeError, r"bias" + DTYPE + "int64"),
    ("bias boolean", cast("bias", torch.bool), DtypeError, r"bias" + DTYPE + "bool"),
    ("bias wider", lambda a: everything(Tensor.bfloat16)(a) | {"bias": a["bias"].double()}, DtypeError,
     r"bias must be bfloat16 or float32 with q of bfloat16, got \S*float64"),
    ("integers", everything(Tensor.long), DtypeError, r"q must be one of bfloat16 or .*, got \S*int64"),
    *((f"{n} device", lambda a, n=n: {n: a[n].to("meta")}, ValueError, rf"{n} must be on q's device cpu, got meta")
      for n in ("k", "v", "bias")),
    ("bias of scores alone", bias(5, 7), ValueError, r"bias must have 4 dimensions \[.*\], got shape \[5, 7\]"),
    ("bias batch", bias(3, 1, 1, 7), ValueError, FORMS + r"\[3, 1, 1, 7\]"),
    ("bias heads", bias(1, 3, 1, 7), ValueError, FORMS + r"\[1, 3, 1, 7\]"),
    ("bias queries", bias(1, 1, 4, 7), ValueError, FORMS + r"\[1, 1, 4, 7\]"),
    ("bias keys", bias(1, 1, 1, 6), ValueError, FORMS + r"\[1, 1, 1, 6\]"),
    ("bias for one key", bias(1, 1, 1, 1), ValueError, FORMS + r"\[1, 1, 1, 1\]"),
    ("bias of keys and queries exchanged", bias(1, 1, 7, 5), ValueError, FORMS + r"\[1, 1, 7, 5\]"),
    ("causal with more queries", lambda a: {"k": a["k"][:, :4], "v": a["v"][:, :4], "bias": None}, ValueError,
     r"causal needs T <= S, .* got T = 5 queries and S = 4 keys"),
    ("causal no boolean", give(causal=1), TypeError, r"causal must be True or False, got 1"),
    ("scale no number", give(scale="big"), TypeError, r"scale must be a number, got str"),
    ("scale a tensor", give(scale=torch.ones(())), TypeError, r"scale must be a number, got Tensor"),
    ("packed rows", give(cu_seqlens=torch.tensor([0, 5])), ValueError, r"cu_seqlens needs .*B = 1, got B = 2"),
    ("packed lengths", packed(0, 5, k=torch.zeros(1, 6, 2, 4), v=torch.zeros(1, 6, 2, 4)), ValueError,
     r"cu_seqlens needs as many queries as keys, got T = 5 and S = 6"),
    ("packed float", packed(0, 5, cu_seqlens=torch.tensor([0.0, 5.0])), TypeError,
     r"cu_seqlens must be int32 or int64, got \S*float32"),
    ("packed rank", packed(0, 5, cu_seqlens=torch.tensor([[0, 5]])), ValueError,
     r"cu_seqlens must have shape \[N .*: pass cu_seqlens\[0\]"),
    ("packed list", packed(0, 5, cu_seqlens=[0, 5]), TypeError,
     r"cu_seqlens must be a torch.Tensor, got list: pass torch.tensor\(cu_seqlens, dtype=torch.int32, device='cpu'\)"),
    ("bias sparse", lambda a: {"bias": a["bias"].to_sparse()}, TypeError, r"bias must be a dense .*bias.to_dense\(\)"),
    ("jagged", lambda a: {"q": torch.nested.nested_tensor(list(a["q"]), layout=torch.jagged)}, TypeError,
     r"q must be a dense tensor, got a nested \(jagged\) one: pass .*cu_seqlens=q.offsets\(\)"),
    ("packed from 1", packed(1, 5), ValueError, r"cu_seqlens must start at 0, got 1"),
    ("packed backwards", packed(0, 4, 3, 5), ValueError, r"cu_seqlens must not decrease, got 4 then 3"),
    ("packed short", packed(0, 2, 4), ValueError, r"cu_seqlens must end at T = 5, got 4"),
    ("unknown backend", give(backend="abacus"), ValueError, r"unknown backend 'abacus', known: .*eager"),
    ("a backend of kda", give(backend="sm90"), ValueError, r"unknown backend 'sm90', known: .*eager"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "text"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_input(change: Callable[[Arguments], Arguments], error: type[Exception], text: str) -> None:
    given = arguments()
    biased_attention(**given)
    with pytest.raises(error, match=text):
        biased_attention(**given | change(given))


X = make_inputs(BiasedCase(T=5, D=4, dtype=FP32))


def loss(bias: Tensor) -> Tensor:
    return call(X._replace(bias=bias), "eager").square().sum()


def forward_mode(bias: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        return loss(torch.autograd.forward_ad.make_dual(bias, bias))


TRANSFORMED: dict[str, Callable[[Tensor], Any]] = {
    "grad": torch.func.grad(loss),
    "grad of an expanded bias": torch.func.grad(lambda bias: loss(bias.expand(1, 1, 5, 5))),
    "vmap": lambda bias: torch.func.vmap(loss)(torch.stack((bias, bias))),
    "jvp": lambda bias: torch.func.jvp(loss, (bias,), (bias,)),
    "forward mode": forward_mode,
}


@pytest.mark.parametrize("how", TRANSFORMED)
def test_transforms_are_refused(how: str) -> None:
    with pytest.raises(RuntimeError, match=r"biased_attention has no rules for torch.func.*use backward\(\)"):
        TRANSFORMED[how](X.bias)


@pytest.mark.parametrize("name", ["q", "bias"])
def test_there_is_no_second_derivative(name: str) -> None:
    leaf = getattr(X, name).clone().requires_grad_()
    (gradient,) = torch.autograd.grad(call(X._replace(**{name: leaf})).square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="biased_attention has no second derivative"):
        gradient.sum().backward()

"""The validator of `biased_attention`: a call that breaks the contract raises an error that names the argument."""

from __future__ import annotations

from torch import Tensor

from ..checks import DTYPES, DtypeError, accumulator_dtype, check_is_tensor, check_offsets, check_tensor, dtype_names
from .contract import Inputs


def check(x: Inputs) -> None:
    """Raise a TypeError or ValueError that names the argument unless `x` keeps the contract."""
    q, k = x.q, x.k
    for name, t in (("q", q), ("k", k)):
        check_is_tensor(name, t)
        if t.ndim != 4:
            raise ValueError(f"{name} must have 4 dimensions, got shape {tuple(t.shape)}")
    (B, T, H, D), (_, S, H_kv, _) = q.shape, k.shape
    for name, dim in (("H", H), ("H_kv", H_kv), ("D", D)):
        if dim == 0:
            raise ValueError(f"{name} must be at least 1, got 0 (q {tuple(q.shape)}, k {tuple(k.shape)})")
    if H % H_kv != 0:
        raise ValueError(f"q's {H} heads must be a multiple of k's {H_kv} heads (grouped heads)")
    if q.dtype not in DTYPES:
        raise DtypeError(f"q must be one of {dtype_names(DTYPES)}, got {q.dtype}: pass q.to(torch.bfloat16)")
    check_tensor("k", k, (B, S, H_kv, D), (q.dtype,), q)
    check_tensor("v", x.v, (B, S, H_kv, D), (q.dtype,), q)
    if not isinstance(x.causal, bool):
        raise TypeError(f"causal must be True or False, got {x.causal!r}")
    if x.cu_seqlens is not None:
        check_offsets(x.cu_seqlens, q)
        if T != S:
            raise ValueError(f"cu_seqlens needs as many queries as keys, got T = {T} and S = {S}")
    if x.causal and T > S:
        raise ValueError(
            f"causal needs T <= S, as query i sees the keys up to i + S - T, got T = {T} queries and S = {S} keys"
        )
    if x.bias is not None:
        _check_bias(x.bias, q, ((1, B), (1, H_kv, H), (1, T), (S,)))


def _check_bias(bias: Tensor, q: Tensor, allowed: tuple[tuple[int, ...], ...]) -> None:
    check_is_tensor("bias", bias)
    got = list(bias.shape)
    if len(got) != 4:
        raise ValueError(f"bias must have 4 dimensions [1|B, 1|H_kv|H, 1|T, S], got shape {got}")
    # Not `n in sizes`: torch.compile does not find a number in a tuple of symbolic sizes.
    if not all(any(n == size for size in sizes) for n, sizes in zip(got, allowed, strict=True)):
        texts = [" or ".join(map(str, dict.fromkeys(sizes))) for sizes in allowed]
        raise ValueError(f"bias must have shape [1|B, 1|H_kv|H, 1|T, S] = [{', '.join(texts)}], got {got}")
    check_tensor("bias", bias, bias.shape, (q.dtype, accumulator_dtype(q.dtype)), q)

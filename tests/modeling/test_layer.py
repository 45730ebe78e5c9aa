"""The layer against a straight-line re-implementation in loops over tokens and heads, and against itself: packed,
padded, continued, decoded, reordered."""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
import math
import pickle
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers import DynamicCache

from kda_layers import KDAConfig, KimiDeltaAttention
from kda_layers.kernels.kda.contract import KDA
from kda_layers.modeling.layer.cache import with_kda_layers
from tests.kernels.cases import BF16, FP64, budget, error
from tests.modeling.common import same

D = 20
LAYERS = {
    "lower_bound": dict(num_heads=2, head_dim=8),
    "softplus": dict(num_heads=2, head_dim=8, gate_activation="softplus", lower_bound=None),
    "grouped_wide_v": dict(
        num_heads=2, head_dim=8, num_value_heads=4, value_head_dim=12, lower_bound=-1.5, conv_kernel_dim=3
    ),
    "neg_eigval": dict(
        num_heads=1, head_dim=12, num_value_heads=3, value_head_dim=4, allow_neg_eigval=True, rms_norm_eps=1e-2
    ),
    "full_rank": dict(num_heads=2, head_dim=8, gate_rank=0),
    "rank_3_biased": dict(num_heads=1, head_dim=8, num_value_heads=2, gate_rank=3, output_gate_bias=True),
    "low_rank_decay": dict(num_heads=2, head_dim=8, gate_rank=0, decay_rank=5),
    "low_rank_gate_fixed_rate": dict(
        num_heads=1, head_dim=8, num_value_heads=2, gate_rank=3, decay_rank=0, output_gate_bias=True, learned_rate=False
    ),
    "head_decay": dict(num_heads=2, head_dim=8, num_value_heads=4, value_head_dim=12, decay="head"),
    "head_decay_softplus": dict(num_heads=2, head_dim=8, decay="head", gate_activation="softplus", lower_bound=None),
}
every_layer = pytest.mark.parametrize("name", LAYERS)
grad_or_not = pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])


def make_layer(name: str = "grouped_wide_v", dtype: torch.dtype = FP64, **options: Any) -> KimiDeltaAttention:
    """A layer whose every parameter matters: none is left at a value that an error could hide behind."""
    torch.manual_seed(0)
    layer = KimiDeltaAttention(D, **LAYERS[name], layer_idx=0, **options).to(dtype)
    with torch.no_grad():
        for parameter_name, p in layer.named_parameters():
            if parameter_name in ("A_log", "dt_bias", "o_norm.weight"):
                p.copy_(torch.rand_like(p) + 0.5)
            else:
                p.mul_(2.0)
    return layer


def tokens(*shape: int, seed: int = 1, dtype: torch.dtype = FP64) -> Tensor:
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(seed), dtype=FP64).to(dtype)


def new_cache(linear: bool = True) -> DynamicCache:
    return DynamicCache(config=KDAConfig(num_hidden_layers=1, full_attention_interval=0 if linear else 1))


def states(cache: DynamicCache) -> tuple[Tensor, Tensor]:
    """Copies of the cached convolution state [N, D, W] and recurrent state [N, HV, V, K]."""
    layer = cache.layers[0]
    return layer.conv_states[0].clone(), layer.recurrent_states[0].clone()


# ---------------------------------------------------------------- against a re-implementation


def straight_line(layer: KimiDeltaAttention, name: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence x [T, D] -> output [T, D], last inputs of the convolution [D, W] and state [HV, V, K].

    Written from the paper's section 4 and the layer's docstring; of the layer only its parameters are read.
    """
    given = LAYERS[name]
    H, K = given["num_heads"], given["head_dim"]
    HV, V, W = given.get("num_value_heads", H), given.get("value_head_dim", K), given.get("conv_kernel_dim", 4)
    w = dict(layer.named_parameters())
    wide = torch.promote_types(x.dtype, torch.float32)
    T, channels = len(x), 2 * H * K + HV * V

    inputs = torch.cat([x @ w[f"{n}_proj.weight"].T for n in "qkv"], 1)
    inputs = torch.cat((inputs.new_zeros(W, channels), inputs))
    o = []
    S = [torch.zeros(V, K, dtype=wide) for _ in range(HV)]
    for t in range(T):
        conv = torch.zeros(channels, dtype=x.dtype)
        for i in range(W):
            conv = conv + w["conv1d.weight"][:, 0, i] * inputs[t + 1 + i]
        conv = conv * torch.sigmoid(conv)
        by_head = given.get("decay") == "head"
        f_rank = 0 if by_head else given.get("decay_rank", given.get("gate_rank"))
        ranks = {"f": f_rank, "g": given.get("gate_rank")}
        logits, gate = (
            w[f"{n}_proj.weight"] @ x[t] if rank == 0 else w[f"{n}_b_proj.weight"] @ (w[f"{n}_a_proj.weight"] @ x[t])
            for n, rank in ranks.items()
        )
        beta = torch.sigmoid((w["b_proj.weight"] @ x[t]).to(wide)) * (2 if given.get("allow_neg_eigval") else 1)
        gate = torch.sigmoid(gate + w["g_b_proj.bias"] if given.get("output_gate_bias") else gate)
        heads = []
        for i in range(HV):
            j = i // (HV // H)
            q = conv[j * K : (j + 1) * K].to(wide)
            k = conv[(H + j) * K : (H + j + 1) * K].to(wide)
            v = conv[2 * H * K + i * V : 2 * H * K + (i + 1) * V].to(wide)
            q, k = (y / torch.sqrt((y * y).sum() + 1e-6) for y in (q, k))
            those = slice(i, i + 1) if by_head else slice(i * K, (i + 1) * K)  # one decay, or one a channel
            a = logits[those].to(wide) + w["dt_bias"][those]
            rate = torch.exp(w["A_log"][i]) if given.get("learned_rate", True) else 1.0
            if given.get("gate_activation") == "softplus":
                log_decay = -rate * torch.log1p(torch.exp(a))
            else:
                log_decay = given.get("lower_bound", -5.0) / (1 + torch.exp(-rate * a))
            S[i] = S[i] * torch.exp(log_decay)
            S[i] = S[i] + torch.outer(beta[i] * (v - S[i] @ k), k)
            y = (S[i] @ q / math.sqrt(K)).to(x.dtype)
            y = y / torch.sqrt((y * y).mean() + given.get("rms_norm_eps", 1e-6)) * w["o_norm.weight"]
            heads.append(y * gate[i * V : (i + 1) * V])
        o.append(w["o_proj.weight"] @ torch.cat(heads))
    return torch.stack(o), inputs[-W:].T, torch.stack(S)


@every_layer
def test_against_a_straight_line(name: str) -> None:
    """Output, both states and every gradient, over more tokens than one chunk."""
    layer, x, weight = make_layer(name), tokens(2, 67), tokens(2, 67, seed=2)
    x.requires_grad_()
    inputs = (x, *layer.parameters())
    rows = [straight_line(layer, name, row) for row in x]
    want = torch.stack([o for o, _, _ in rows])
    d_want = torch.autograd.grad((want * weight).sum(), inputs)
    got = layer(x)
    d_got = torch.autograd.grad((got * weight).sum(), inputs)
    same((got,), (want,))
    assert all(d.abs().max() > 0 for d in d_want), "an input has no effect"
    same(d_got, d_want)
    cache = new_cache()
    with torch.no_grad():
        same((layer(x, past_key_values=cache),), (want,))
    same(states(cache), [torch.stack([row[i] for row in rows]) for i in (1, 2)])


@every_layer
def test_low_precision(name: str) -> None:
    """A bf16 layer is as wrong as the same formulas in bf16, and keeps its gate's parameters where they are put."""
    layer, x = make_layer(name, BF16), tokens(1, 67, dtype=BF16)
    for parameter_name, p in layer.named_parameters():
        if parameter_name in layer.kept_in_fp32:
            p.data = p.data.float()
    exact = copy.deepcopy(layer).double()
    with torch.no_grad():
        truth, _, state = straight_line(exact, name, x[0].double())
        yardstick, _, bf16_state = straight_line(layer, name, x[0])
        cache = new_cache()
        o = layer(x, past_key_values=cache)
    conv, recurrent = states(cache)
    assert (o.dtype, conv.dtype, recurrent.dtype) == (BF16, BF16, torch.float32)
    assert error(o[0], truth) <= budget(error(yardstick, truth), BF16)
    assert error(recurrent[0], state) <= budget(error(bf16_state, state), BF16)
    layer(x).sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == p.dtype for p in layer.parameters())


# ---------------------------------------------------------------- packed and padded


@every_layer
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64], ids=str)
def test_packed_is_each_sequence_alone(name: str, offsets_dtype: torch.dtype) -> None:
    lengths = (0, 3, 1, 66, 0, 2)
    layer, x, weight = make_layer(name), tokens(1, sum(lengths)), tokens(1, sum(lengths), seed=2)
    inputs = (x.requires_grad_(), *layer.parameters())
    got = layer(x, cu_seqlens=torch.tensor((0, *itertools.accumulate(lengths)), dtype=offsets_dtype))
    want = torch.cat([layer(part) for part in x.split(lengths, 1) if part.shape[1]], 1)
    same((got,), (want,))
    same(*(torch.autograd.grad((o * weight).sum(), inputs) for o in (got, want)))


def padded(x: Tensor, padding: tuple[int, ...], where: str = "left") -> tuple[Tensor, Tensor]:
    """x with so many tokens of each row, at an end or anywhere, replaced by large numbers; the mask that hides them."""
    T = x.shape[1]
    place = {"left": torch.arange(T), "right": T - 1 - torch.arange(T), "anywhere": torch.randperm(T)}[where]
    mask = (place >= torch.tensor(padding)[:, None]).long()
    return torch.where(mask[..., None] == 1, x, 1e3), mask


anywhere = pytest.mark.parametrize("where", ["left", "right", "anywhere"])


@every_layer
@grad_or_not
@anywhere
@pytest.mark.parametrize("T", [6, 69])
def test_padding_is_as_if_it_were_not_there(name: str, T: int, where: str, grad: bool) -> None:
    """First turn, a continued turn with other numbers of padding tokens (all of them), decoding; outputs and states."""
    layer, padding = make_layer(name), ((0, 2, 5), (1, 0, T), (0, 0, 0))
    turns = [padded(tokens(3, n, seed=i), p, where) for i, (n, p) in enumerate(zip((T, T, 1), padding, strict=True))]
    with torch.set_grad_enabled(grad):
        cache, alone = new_cache(), [new_cache() for _ in range(3)]
        for turn, (x, mask) in enumerate(turns):
            past = torch.cat([m for _, m in turns[: turn + 1]], 1)  # the whole mask, of which the last columns count
            o = layer(x, past, cache) if turn < 2 else layer(x, None, cache)
            for n in range(3):
                real = mask[n] == 1
                if real.any():
                    want = layer(x[n : n + 1, real], past_key_values=alone[n])
                    same((o[n : n + 1, real],), (want,))
                same([s[n : n + 1] for s in states(cache)], states(alone[n]))
            if turn == 0:
                same((layer(x, mask),), (o,))


@every_layer
@anywhere
@pytest.mark.parametrize("mask_dtype", [torch.int64, torch.bool, torch.float32], ids=str)
def test_padding_without_a_cache(name: str, where: str, mask_dtype: torch.dtype) -> None:
    """Real tokens' outputs and all gradients are those of the rows without padding."""
    layer, padding = make_layer(name), (0, 3, 7)
    x, mask = padded(tokens(3, 8), padding, where)
    x.requires_grad_()
    weight = tokens(3, 8, seed=2) * mask[..., None]
    inputs = (x, *layer.parameters())
    got = layer(x, mask.to(mask_dtype))
    total = sum((layer(x[n : n + 1, m == 1]) * weight[n, m == 1]).sum() for n, m in enumerate(mask))
    same(((got * weight).sum(),), (total,))
    same(*(torch.autograd.grad(loss, inputs) for loss in ((got * weight).sum(), total)))
    for n, m in enumerate(mask):
        same((got[n : n + 1, m == 1],), (layer(x[n : n + 1, m == 1]),))


# ---------------------------------------------------------------- continued


def run(layer: KimiDeltaAttention, x: Tensor, lengths: tuple[int, ...], cache: DynamicCache) -> Tensor:
    return torch.cat([layer(part, past_key_values=cache) for part in x.split(lengths, 1)], 1)


@every_layer
@grad_or_not
@pytest.mark.parametrize("kda_cache", [False, True], ids=["stock_cache", "kda_cache"])
def test_any_split_equals_one_pass(name: str, grad: bool, kda_cache: bool) -> None:
    """Prefill and decode token by token from every split point, and turns of several tokens."""
    layer, T = make_layer(name), 8
    splits = [(n, *(1,) * (T - n)) for n in range(1, T + 1)] + [(3, 5), (1, 4, 3), (2, 2, 2, 2)]
    long = [(n, 1, 140 - 1 - n) for n in (63, 64, 65, 127, 128)] + [(3, 64, 70, 3)]
    with torch.set_grad_enabled(grad):
        for x, cases in ((tokens(2, T), splits), (tokens(2, 140), long)):
            want, whole = layer(x), new_cache()
            layer(x, past_key_values=whole)
            for lengths in cases:
                cache = with_kda_layers(new_cache()) if kda_cache else new_cache()
                same((run(layer, x, lengths, cache),), (want,))
                same(states(cache), states(whole))


@every_layer
def test_packed_prefill_then_batched_decode(name: str) -> None:
    """The cache of packed sequences has a row for each, also for an empty one."""
    layer, lengths = make_layer(name), (5, 0, 1, 66)
    x, step, turn = tokens(1, sum(lengths)), tokens(4, 1, seed=2), tokens(1, 7, seed=3)
    with torch.no_grad():
        cache = new_cache()
        layer(x, past_key_values=cache, cu_seqlens=torch.tensor((0, *itertools.accumulate(lengths))))
        assert [s.shape[0] for s in states(cache)] == [4, 4]
        got = layer(step, past_key_values=cache)
        packed = layer(turn, past_key_values=cache, cu_seqlens=torch.tensor((0, 2, 2, 6, 7)))
        for n, part in enumerate(x.split(lengths, 1)):
            alone, mine = new_cache(), turn[:, (0, 2, 2, 6)[n] : (2, 2, 6, 7)[n]]
            if part.shape[1]:
                layer(part, past_key_values=alone)
            same((got[n : n + 1],), (layer(step[n : n + 1], past_key_values=alone),))
            if mine.shape[1]:
                out = layer(mine, past_key_values=alone)
                same((packed[:, (0, 2, 2, 6)[n] : (2, 2, 6, 7)[n]],), (out,))
            same([s[n : n + 1] for s in states(cache)], states(alone))


@pytest.mark.parametrize("offsets", [None, (0, 0), (0, 0, 0)], ids=str)
def test_no_tokens_are_refused(offsets: tuple[int, ...] | None) -> None:
    with pytest.raises(ValueError, match="T must be at least 1, got 0"):
        make_layer()(tokens(1, 0), cu_seqlens=None if offsets is None else torch.tensor(offsets))


@pytest.mark.parametrize("kda_cache", [False, True], ids=["stock_cache", "kda_cache"])
def test_reordered_cache(kda_cache: bool) -> None:
    """Both states follow the beams, so that decoding goes on as for the reordered rows."""
    layer, x, order = make_layer(), tokens(3, 5), torch.tensor([2, 0, 2])
    with torch.no_grad():
        cache = with_kda_layers(new_cache()) if kda_cache else new_cache()
        layer(x, past_key_values=cache)
        before = states(cache)
        cache.reorder_cache(order)
        same(states(cache), [s[order] for s in before])
        y = tokens(3, 2, seed=2)
        want = layer(torch.cat((x[order], y), 1))[:, -2:]
        same((run(layer, y, (1, 1), cache),), (want,))


def test_gradients_stop_at_the_cache() -> None:
    """A turn's gradients are those with the state before it as a constant, also after the cache moved on."""
    layer, x = make_layer(), tokens(1, 6)
    cache = new_cache()
    layer(x, past_key_values=cache)
    turn, weight = tokens(1, 3, seed=2).requires_grad_(), tokens(1, 3, seed=3)
    o = layer(turn, past_key_values=cache)
    layer(x, past_key_values=cache)  # overwrites the states that autograd may have kept
    (d_turn,) = torch.autograd.grad((o * weight).sum(), turn)
    whole = torch.cat((x, turn), 1)
    (want,) = torch.autograd.grad((layer(whole)[:, -3:] * weight).sum(), turn)
    same((d_turn,), (want,))
    assert not any(s.requires_grad for s in states(cache))


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_reach_every_parameter_of_a_fresh_layer(name: str) -> None:
    torch.manual_seed(0)
    layer = KimiDeltaAttention(D, **LAYERS[name])
    layer(tokens(2, 9, dtype=torch.float32)).square().sum().backward()
    for n, p in layer.named_parameters():
        assert p.grad is not None, n
        assert p.grad.isfinite().all(), n
        assert p.grad.abs().max() > 0, n


# ---------------------------------------------------------------- errors


CALLS = {
    "mask of rank 4": (dict(attention_mask=torch.ones(2, 1, 4, 4)), ValueError, r"attention_mask .*2 dim.*2, 1, 4, 4"),
    "mask too short": (dict(attention_mask=torch.ones(2, 3)), ValueError, r"attention_mask .*at least 4.*\[2, 3\]"),
    "mask of another batch": (dict(attention_mask=torch.ones(3, 4)), ValueError, r"attention_mask .*\[2, .*\[3, 4\]"),
    "packed and padded": (
        dict(attention_mask=torch.ones(2, 4), cu_seqlens=torch.tensor([0, 4])),
        ValueError,
        "attention_mask must be None with cu_seqlens",
    ),
    "packed batch": (dict(cu_seqlens=torch.tensor([0, 4])), ValueError, "cu_seqlens .*B = 1, got B = 2"),
    "unknown argument": (dict(cu_seq_lens=torch.tensor([0, 4])), TypeError, "cu_seq_lens"),
    "output_attentions": (dict(output_attentions=True), TypeError, "output_attentions"),
    "softmax cache": (dict(past_key_values=new_cache(linear=False)), ValueError, "index 0, got DynamicLayer"),
    "short cache": (dict(past_key_values=DynamicCache()), ValueError, "index 0, got no layer"),
}


@pytest.mark.parametrize("case", CALLS)
def test_refused_calls(case: str) -> None:
    arguments, kind, message = CALLS[case]
    with pytest.raises(kind, match=message):
        make_layer()(tokens(2, 4), **arguments)
    for layer in arguments.get("past_key_values", DynamicCache()).layers:
        assert not any(getattr(layer, "has_previous_state", {}).values()), "a refused call changed the cache"


def test_a_cache_needs_an_index() -> None:
    layer = KimiDeltaAttention(D, 2, 8).double()
    with pytest.raises(ValueError, match="layer_idx must be given"):
        layer(tokens(1, 4), past_key_values=new_cache())


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 3], "end at T = 4, got 3"),
        ([0, 6], "end at T = 4, got 6"),
        ([1, 4], "start at 0, got 1"),
        ([0, 3, 2, 4], "not decrease, got 3 then 2"),
    ],
    ids=str,
)
def test_offsets_that_do_not_fit(offsets: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=f"cu_seqlens must {message}"):
        make_layer()(tokens(1, 4), cu_seqlens=torch.tensor(offsets))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (dict(num_value_heads=3), ValueError, "num_value_heads must be a multiple of num_heads = 2, got 3"),
        (dict(num_heads=0), ValueError, "num_heads must be at least 1, got 0"),
        (dict(conv_kernel_dim=0), ValueError, "conv_kernel_dim must be at least 1, got 0"),
        (dict(value_head_dim=-1), ValueError, "value_head_dim must be at least 1, got -1"),
        (dict(gate_activation="log_decay"), ValueError, "gate_activation must be .*'log_decay'"),
        (dict(gate_activation="sigmoid"), ValueError, "gate_activation must be .*'sigmoid'"),
        (dict(lower_bound=-5.1), ValueError, r"lower_bound must be in \[-5, 0\), got -5.1"),
        (dict(lower_bound=0.0), ValueError, r"lower_bound must be in \[-5, 0\), got 0"),
        (dict(lower_bound=float("nan")), ValueError, r"lower_bound must be in \[-5, 0\), got nan"),
        (dict(lower_bound=None), ValueError, "lower_bound must be given"),
        (dict(lower_bound="-5"), TypeError, "lower_bound must be a number, got str"),
        (dict(gate_activation="softplus"), ValueError, "lower_bound must be None with gate_activation='softplus'"),
        (dict(dropout=0.1), TypeError, "unexpected keyword argument dropout$"),
        (dict(expand_v=2.0), TypeError, r"expand_v \(use value_head_dim = head_dim \* expand_v\)"),
        (dict(safe_gate=True), TypeError, r"safe_gate \(use gate_activation='lower_bound' for True"),
    ],
    ids=lambda a: str(a) if isinstance(a, dict) else "",
)
def test_refused_options(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        KimiDeltaAttention(**(dict(hidden_size=D, num_heads=2, head_dim=8) | arguments))


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match=r"'abacus'.*eager"):
        KimiDeltaAttention(D, 2, 8, backend="abacus")(torch.zeros(1, 2, D))


# ---------------------------------------------------------------- the module


@pytest.mark.parametrize("gate_activation", ["lower_bound", "softplus"])
def test_fresh_gates(gate_activation: str) -> None:
    """softplus(dt_bias) log-uniform in [1e-3, 1e-1]; rate 1 with a lower bound, else uniform in [1, 16]."""
    torch.manual_seed(0)
    bound = -5.0 if gate_activation == "lower_bound" else None
    layer = KimiDeltaAttention(8, 64, 32, gate_activation=gate_activation, lower_bound=bound)
    assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32
    log_dt = softplus(layer.dt_bias.double()).log()
    rate = layer.A_log.double().exp()
    uniform = [(log_dt, math.log(1e-3), math.log(1e-1))]
    if bound is None:
        uniform.append((rate, 1.0, 16.0))
    else:
        assert torch.equal(layer.A_log, torch.zeros(64))
        decay = bound * torch.sigmoid(layer.dt_bias.double())  # of a zero logit, -5 (1 - exp(-dt))
        assert -5.001 * -math.expm1(-1e-1) < decay.min() < decay.max() < -4.999 * -math.expm1(-1e-3)
    for values, low, high in uniform:
        slack = 1e-5 * (high - low)  # fp32
        assert low - slack <= values.min() <= values.max() <= high + slack
        quantiles, n = ((values - low) / (high - low)).sort().values, len(values)
        assert quantiles[0] < 10 / n
        assert quantiles[-1] > 1 - 10 / n
        distance = (quantiles - (torch.arange(n) + 0.5) / n).abs().max()
        assert distance < 1.63 / math.sqrt(n)  # Kolmogorov-Smirnov at 1 %


def test_reset_gate_draws_again() -> None:
    layer = KimiDeltaAttention(8, 2, 8, gate_activation="softplus", lower_bound=None)
    before = layer.A_log.detach().clone(), layer.dt_bias.detach().clone()
    layer.reset_gate()
    assert not torch.equal(layer.A_log, before[0])
    assert not torch.equal(layer.dt_bias, before[1])


COPIES = {
    "itself": lambda layer: layer,
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "cast": lambda layer: layer.double(),
}


@pytest.mark.parametrize("copied", COPIES)
def test_copies(copied: str) -> None:
    """Copies compute the same, share nothing, and their gate's parameters still carry the optimizers' mark."""
    layer, x = make_layer(dtype=torch.float32), tokens(1, 5, dtype=torch.float32)
    want = layer(x)
    other = COPIES[copied](layer)
    assert torch.equal(other(x.to(other.o_proj.weight.dtype)).float(), want) or copied == "cast"
    if copied in ("deepcopy", "pickle"):
        assert {p.data_ptr() for p in layer.parameters()}.isdisjoint(p.data_ptr() for p in other.parameters())
    marked = {n for n, p in other.named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert marked == {"A_log", "dt_bias"}


def test_state_dict_round_trip() -> None:
    layer, x = make_layer(), tokens(1, 5)
    other = KimiDeltaAttention(D, **LAYERS["grouped_wide_v"]).double()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


def test_forward_is_a_short_straight_line() -> None:
    """Under 50 lines besides the docstring, without loops and without the name of a backend."""
    source = textwrap.dedent(inspect.getsource(KimiDeltaAttention.forward))
    function = ast.parse(source).body[0]
    body = function.body[1:] if ast.get_docstring(function) else function.body
    assert body[-1].end_lineno - body[0].lineno + 1 < 50
    assert not any(isinstance(node, ast.For | ast.While) for node in ast.walk(function))
    assert not [name for name in (*KDA.backends(), "fla", "triton", "sm90", "sm100", "cuda") if name in source.lower()]

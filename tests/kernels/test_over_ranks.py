"""`kda` and the short convolution over ranks: every output and gradient as in one pass over the whole sequence.

All processes compare: the first one's state before is zero, and so are errors in it. Gates are slow and writes weak, so
that the first tokens still matter to the last ones; each case asserts that they do.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kda_layers.kernels.fused.short_conv import short_convs
from kda_layers.kernels.kda.backends.eager import EagerBackend
from kda_layers.kernels.kda.contract import KDA, Gradients, Inputs, KDAOutput
from kda_layers.kernels.kda.op import kda
from kda_layers.kernels.over_ranks.kda import TOKENS, kda_over_ranks
from kda_layers.kernels.over_ranks.shards import Shards, chain_pays
from kda_layers.kernels.over_ranks.short_conv import short_convs_over_ranks
from kda_layers.testing.budgets import BF16, FP32, FP64, budget, error
from tests.ranks import Cases, Ranks, exchanges, outcomes

PARAMETERS = ("A_log", "dt_bias", "initial_state")  # their gradients are partial sums
MATTERS = 0.05  # relative difference of outputs without what other ranks know; roundings are below 1e-12


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FP64)


def cut(t: Tensor, shards: Shards) -> Tensor:
    """This rank's tokens of [B, T, ...]."""
    pieces = t.chunk(len(shards.places) * shards.pieces, 1)
    return torch.cat([pieces[i] for i in shards.places[shards.rank]], 1)


def order(shards: str | tuple[tuple[int, ...], ...], group: Any = None) -> Shards:
    """Shards of a name or of places: "chain" and "gathered" are contiguous ones, other places are gathered."""
    if shards == "balanced":
        return Shards.balanced(group)
    contiguous = Shards.contiguous(group)
    if isinstance(shards, str):
        return contiguous._replace(chain={"chain": True, "gathered": False}[shards])
    return Shards(contiguous.group, shards, chain=len(shards[0]) == 1)


@dataclass(frozen=True)
class Call:
    """A call of `kda`, cut over the ranks."""

    T: int = 20  # tokens of each rank
    B: int = 2
    H: int = 2
    HV: int = 4
    K: int = 16
    V: int = 12
    shards: str | tuple[tuple[int, ...], ...] = "balanced"
    gate: str = "lower_bound"
    beta: str = "sigmoid"
    without: tuple[str, ...] = ()  # of PARAMETERS
    final: str | None = "all"  # which ranks' losses read the final state; None for no final state
    outputs: bool = True  # the losses read the outputs
    constant: tuple[str, ...] = ()  # inputs that need no gradient
    lengths: tuple[int, ...] | None = None  # of packed sequences
    offsets: torch.dtype = torch.int32
    dtype: torch.dtype = FP64
    options: dict[str, Any] = field(default_factory=dict)
    strided: bool = False
    backend: str | None = None  # over ranks
    others_matter: bool = True
    head_gates: bool = False  # one gate a head

    def inputs(self, tokens: int) -> dict[str, Tensor]:
        B, H, HV, K, V = self.B, self.H, self.HV, self.K, self.V
        x = dict(
            q=randn(B, tokens, H, K, seed=1), k=randn(B, tokens, H, K, seed=2), v=randn(B, tokens, HV, V, seed=3),
            g=randn(B, tokens, HV, K, seed=4) - 5.5, beta=randn(B, tokens, HV, seed=5) - 3.0,
            A_log=0.1 * randn(HV, seed=6), dt_bias=0.1 * randn(HV, K, seed=7), initial_state=randn(B, HV, V, K, seed=8),
        )  # fmt: skip
        if not self.options.get("qk_l2norm", True):
            x["q"], x["k"] = 0.7 * K**-0.5 * x["q"], 0.7 * K**-0.5 * x["k"]
        if self.beta == "given":
            x["beta"] = x["beta"].sigmoid()
        if self.gate == "log_decay":
            x["g"] = -0.02 * x["g"].sigmoid()
        if self.head_gates:
            x["g"], x["dt_bias"] = x["g"][..., 0], x["dt_bias"][:, 0]
        unused = {"A_log", "dt_bias"} if self.gate == "log_decay" else set()
        narrow = {n: t.to(self.dtype) if n in TOKENS else t.to(FP32) for n, t in x.items()}
        x = x if self.dtype == FP64 else narrow
        return {n: t for n, t in x.items() if n not in self.without and n not in unused}

    @property
    def arguments(self) -> dict[str, Any]:
        bound = -1.0 if self.gate == "lower_bound" else None
        given = dict(gate_activation=self.gate, lower_bound=bound, beta_activation=self.beta)
        return given | {"final_state": self.final is not None} | self.options


def run(call: Call, ranks: Ranks, group: Any = None) -> None:
    """The call over ranks, and once as a whole."""
    shards = order(call.shards, group)
    size, rank = len(shards.places), shards.rank
    total = size * call.T
    offsets = None
    if call.lengths is not None:
        assert sum(call.lengths) == total
        offsets = torch.tensor((0, *itertools.accumulate(call.lengths)), dtype=call.offsets)
    d_o, d_final = randn(call.B, total, call.HV, call.V, seed=9), randn(call.B, call.HV, call.V, call.K, seed=10)
    reads = {None: [], "none": [], "first": [0], "last": [size - 1], "all": list(range(size))}[call.final]

    def leaves(x: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: t.detach().clone().requires_grad_(n not in call.constant) for n, t in x.items()}

    def whole(x: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        out = kda(**x, cu_seqlens=offsets, **call.arguments)
        loss = (out.o * d_o).sum() * call.outputs
        if reads:
            loss = loss + len(reads) * (out.final_state * d_final).sum()
        if loss.requires_grad:
            loss.backward()
        return out, x

    given = call.inputs(total)
    truth, wanted = whole(leaves({n: t.double() for n, t in given.items()}))
    one, of_one = (truth, wanted) if call.dtype == FP64 else whole(leaves(given))
    mine = leaves({n: cut(t, shards) if n in TOKENS else t for n, t in given.items()})
    x = {n: t.mT.contiguous().mT if call.strided and n in TOKENS else t for n, t in mine.items()}
    tokens, parameters = [x[n] for n in TOKENS], {n: t for n, t in x.items() if n not in TOKENS}
    given_to_ranks = call.arguments | {"cu_seqlens": offsets, "backend": call.backend}
    out = kda_over_ranks(*tokens, shards, **parameters, **given_to_ranks)
    loss = (out.o * cut(d_o, shards)).sum() * call.outputs
    if rank in reads:
        loss = loss + (out.final_state * d_final).sum()
    elif reads and not call.outputs:  # a loss of nothing would leave out the backward
        loss = loss + 0 * out.final_state.sum()
    if loss.requires_grad:
        loss.backward()

    def compare(name: str, got: Any, want: Any, of_one: Any) -> None:
        limit = budget(0.0 if want is None or call.dtype == FP64 else error(of_one.detach(), want.detach()), call.dtype)
        if got is not None and want is not None:
            limit *= 4 if got.dtype == BF16 else 1  # a slice may hold more of an error than the whole
        ranks.same(name, got, want, limit)

    compare("o", out.o, cut(truth.o, shards), cut(one.o, shards))
    ranks.check(out.checkpoints is None, "checkpoints")
    compare("final_state", out.final_state, truth.final_state, one.final_state)
    for name, t in mine.items():
        got, want, single = t.grad, wanted[name].grad, of_one[name].grad
        if name in TOKENS and want is not None:
            want, single = cut(want, shards), cut(single, shards)
        elif got is not None:
            got = got.clone()
            dist.all_reduce(got, group=group)
        ranks.check(got is None or got.dtype == t.dtype, f"dtype of the gradient of {name}")
        compare(f"gradient of {name}", got, want, single)

    local = None if offsets is None else (offsets - rank * call.T).clamp(0, call.T)
    from_zero = {n: t for n, t in parameters.items() if n != "initial_state"}
    alone = kda(*tokens, **from_zero, cu_seqlens=local, **call.arguments).o
    if call.others_matter and (offsets is None or rank * call.T not in offsets):
        pieces = cut(truth.o, shards).chunk(shards.pieces, 1)
        for place, piece, without in zip(shards.places[rank], pieces, alone.chunk(shards.pieces, 1), strict=True):
            if place:
                ranks.far(f"o of piece {place} alone", without, piece, MATTERS)
    if call.others_matter and call.lengths is None and size * shards.pieces > 2 and call.dtype == FP64:
        first = total // (size * shards.pieces)  # tokens of the first piece
        without = given | {"v": torch.cat((0 * given["v"][:, :first], given["v"][:, first:]), 1)}
        with torch.no_grad():
            last = kda(**without, **call.arguments).o[:, -first:]
        ranks.far("the last piece without the first", last, truth.o[:, -first:], 0.01)


# ---------------------------------------------------------------- other cases of the operator


def operands(seed: int = 0, T: int = 8, **changed: Any) -> dict[str, Tensor]:
    """Arguments of a small call of `kda_over_ranks`, of this rank's tokens."""
    x: dict[str, Any] = dict(
        q=randn(1, T, 1, 4, seed=seed), k=randn(1, T, 1, 4, seed=seed + 1), v=randn(1, T, 1, 4, seed=seed + 2),
        g=randn(1, T, 1, 4, seed=seed + 3), beta=randn(1, T, 1, seed=seed + 4), lower_bound=-1.0,
    )  # fmt: skip
    return x | changed


def no_grad(ranks: Ranks) -> None:
    """Without gradients nothing is kept, and inference mode works."""
    shards, x = Shards.balanced(), operands(seed=ranks.rank)
    wanted = kda_over_ranks(**(x | {"q": x["q"].requires_grad_()}), shards=shards).o
    ranks.check(wanted.requires_grad, "needs a gradient")
    for name, context in (("no_grad", torch.no_grad), ("inference_mode", torch.inference_mode)):
        with context():
            out = kda_over_ranks(**x, shards=shards)
        ranks.check(not out.o.requires_grad, f"{name}: gradient")
        ranks.same(name, out.o, wanted)


def calls_in_turns(ranks: Ranks) -> None:
    """Two calls before either backward, whose backward passes are in any order, the same on all ranks."""
    first, second = (operands(seed=10 * n + ranks.rank) for n in (1, 2))
    wanted = []
    for x, shards in ((first, Shards.balanced()), (second, Shards.contiguous())):
        v = x["v"].clone().requires_grad_()
        kda_over_ranks(**(x | {"v": v}), shards=shards).o.square().sum().backward()
        wanted.append(v.grad)
    vs = [x["v"].clone().requires_grad_() for x in (first, second)]
    a = kda_over_ranks(**(first | {"v": vs[0]}), shards=Shards.balanced()).o.square().sum()
    b = kda_over_ranks(**(second | {"v": vs[1]}), shards=Shards.contiguous()).o.square().sum()
    a.backward(retain_graph=True)
    b.backward()
    a.backward()
    ranks.same("second call", vs[1].grad, wanted[1])
    ranks.same("first call, twice", vs[0].grad, 2 * wanted[0])


class Replacing(EagerBackend):
    """Keeps keys and gates of its own in place of those given, as backends do that prepare inputs."""

    name = "replacing"
    priority = -1

    def replaces(self, x: Inputs) -> tuple[str, ...]:
        return "k", "g"

    def forward(self, x: Inputs, save: bool) -> tuple[KDAOutput, list[Tensor]]:
        out, saved = super().forward(x, save)
        return out, [2 * x.k, x.g - 1, *saved] if save else []

    def backward(self, x: Inputs, *args: Any) -> Gradients:
        return super().backward(x._replace(k=x.k / 2, g=x.g + 1), *args)


def replaced_inputs(ranks: Ranks) -> None:
    """A backend that does not keep its inputs gets what it kept, with the shapes of pieces."""
    with mock.patch.dict(KDA.backends(), {"replacing": Replacing()}):
        packed = dict(lengths=(5, 30, 5), B=1)
        for shards, options in (("balanced", {}), ("chain", {}), ("chain", packed), ("gathered", packed)):
            no_states = dict(without=("initial_state",), final=None) if options else {}
            run(Call(shards=shards, backend="replacing", **options, **no_states), ranks)


def not_finite(ranks: Ranks) -> None:
    """NaN in one packed sequence reaches no other one, neither in outputs nor in gradients."""
    for lengths in ((10, 20, 30, 12), (22, 26, 24)):
        for shards in ("chain", "gathered"):
            separate(lengths, order(shards), ranks)


def separate(lengths: tuple[int, ...], shards: Shards, ranks: Ranks) -> None:
    call = Call(**(PACKED.__dict__ | dict(lengths=lengths)))
    total = call.T * ranks.size
    offsets = torch.tensor((0, *itertools.accumulate(lengths)))
    whole = {n: t.requires_grad_(n in TOKENS) for n, t in call.inputs(total).items()}
    sequence = torch.searchsorted(offsets, torch.arange(total), right=True) - 1

    def results(bad: int | None) -> dict[str, Tensor]:
        x = {n: cut(t.detach(), shards) if n in TOKENS else t for n, t in whole.items()}
        mine = cut(sequence[None], shards)[0]
        if bad is not None:
            x["v"] = x["v"].masked_fill((mine == bad)[:, None, None], math.nan)
        x = {n: t.clone().requires_grad_(n in TOKENS) for n, t in x.items()}
        o = kda_over_ranks(**x, shards=shards, cu_seqlens=offsets, **call.arguments).o
        o.sum().backward()
        ends = x["v"].detach().flatten(2).requires_grad_()
        (y,) = short_convs_over_ranks([ends], randn(call.HV * call.V, 4, seed=1), shards, offsets)
        y.sum().backward()
        found = {n: x[n].grad for n in TOKENS} | dict(o=o, y=y, ends=ends.grad)
        return {n: t.detach()[:, mine != bad] if bad is not None else t.detach() for n, t in found.items()}

    wanted = results(None)
    for bad in range(len(lengths)):
        others = cut(sequence[None], shards)[0] != bad
        for n, t in results(bad).items():
            ranks.same(f"{n}, NaN in sequence {bad}", t, wanted[n][:, others])


def second_derivative(ranks: Ranks) -> None:
    x = operands(seed=ranks.rank)
    x["q"].requires_grad_()
    (d_q,) = torch.autograd.grad(kda_over_ranks(**x, shards=Shards.balanced()).o.sum(), x["q"], create_graph=True)
    with ranks.raises(RuntimeError, "kda_over_ranks has no second derivative"):
        d_q.sum().backward()


def compiled(ranks: Ranks) -> None:
    """Both operators in one graph, rows and packed: values, gradients, and the shapes that the compiler assumes."""
    offsets = torch.tensor([0, 5, 11, 8 * ranks.size], dtype=torch.int32)
    for name, shards, cu_seqlens in (
        ("balanced", Shards.balanced(), None), ("chain", order("chain"), None), ("packed", order("chain"), offsets),
        ("packed, gathered", order("gathered"), offsets),
    ):  # fmt: skip
        results = []
        for wrap in (lambda f: f, partial(torch.compile, fullgraph=True, backend="aot_eager")):
            x, weight = operands(seed=ranks.rank), randn(4, 3, seed=6).requires_grad_()
            leaves = [x[n].requires_grad_() for n in TOKENS]
            final = cu_seqlens is None

            def f(v: Tensor, weight: Tensor, x: Any, shards: Any, offsets: Any, final: bool) -> list[Tensor]:
                (v,) = short_convs_over_ranks([v.flatten(2)], weight, shards, offsets)
                x = x | {"v": v.unflatten(2, (1, 4))}
                out = kda_over_ranks(**x, shards=shards, cu_seqlens=offsets, return_final_state=final)
                return [out.o, *([out.final_state] if final else [])]

            outputs = wrap(f)(x["v"], weight, x, shards, cu_seqlens, final)
            sum(t.square().sum() for t in outputs).backward()
            results.append([*outputs, weight.grad, *(t.grad for t in leaves)])
        for n, (got, want) in enumerate(zip(*results, strict=True)):
            ranks.same(f"{name}: result {n}", got, want)


def checkpointed(ranks: Ranks) -> None:
    """Gradients are those without checkpointing; a layer with a memory exchanges nothing again."""
    for shards, reentrant, remembers in itertools.product(("chain", "balanced"), (False, True), (False, True)):
        grads, exchanged = [], []
        for again in (False, True):
            x = operands(seed=ranks.rank)
            v = x["v"].requires_grad_()
            at = order(shards)._replace(memory={} if remembers else None)

            def f(v: Tensor, x: Any = x, at: Shards = at) -> Tensor:
                at = at.of_layer(f)
                (v,) = short_convs_over_ranks([v.flatten(2)], randn(4, 3, seed=6), at)
                return kda_over_ranks(**(x | {"v": v.unflatten(2, (1, 4))}), shards=at).o

            with exchanges() as found:
                o = checkpoint(f, v, use_reentrant=reentrant) if again else f(v)
                o.square().sum().backward()
            grads.append(v.grad)
            exchanged.append(len(found))
        name = f"{shards}, reentrant={reentrant}, remembers={remembers}"
        ranks.same(name, grads[1], grads[0])
        ranks.check((exchanged[1] == exchanged[0]) == remembers, f"{name}: {exchanged} exchanges")


def used_twice(ranks: Ranks) -> None:
    """A checkpointed layer that is called twice remembers nothing, as recomputations come in another order."""
    grads = []
    for again in (False, True):
        x, at = operands(seed=ranks.rank), order("chain")._replace(memory={})
        v = x["v"].requires_grad_()

        def f(v: Tensor, x: Any = x, at: Shards = at) -> Tensor:
            return kda_over_ranks(**(x | {"v": v}), shards=at.of_layer(f)).o

        for _ in range(2):
            v_next = checkpoint(f, v, use_reentrant=False) if again else f(v)
            v = v_next
        v.square().sum().backward()
        grads.append(x["v"].grad)
    ranks.same("gradient", grads[1], grads[0])


def refused(ranks: Ranks) -> None:
    """Every error, on all ranks: arguments of `kda_over_ranks` and of the convolution."""
    balanced, contiguous = Shards.balanced(), Shards.contiguous()
    ends = torch.tensor([0, 8 * ranks.size])
    state = randn(1, 1, 4, 4, seed=1)
    whole = {"shards": contiguous, "cu_seqlens": ends}
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, r"shards must be a Shards, .*got tuple", dict(shards=("group", ((0,), (1,))))),
        (ValueError, r"q must have as many tokens in each of 2 pieces.*got T = 9", operands(T=9)),
        (ValueError, r"T must be at least 1, got 0", operands(T=0)),
        (ValueError, r"k must have shape \[1, 8, 1, 4\], got \[1, 7, 1, 4\]", dict(k=operands(T=7)["k"])),
        (ValueError, r"shards must be contiguous with cu_seqlens, got places \(\(0, 3\)", dict(cu_seqlens=ends)),
        (ValueError, r"initial_state must not be given with cu_seqlens", whole | dict(initial_state=state)),
        (ValueError, r"return_final_state must not be given with cu_seqlens", whole | dict(return_final_state=True)),
        (ValueError, r"return_final_state must not be given with", whole | dict(final_state=True)),  # its old name
        (TypeError, r"cu_seqlens must be int32 or int64", whole | dict(cu_seqlens=ends.float())),
        (ValueError, r"cu_seqlens must end at T = 16, got 8", whole | dict(cu_seqlens=ends // 2)),
        (ValueError, r"cu_seqlens must start at 0, got 1", whole | dict(cu_seqlens=ends.clamp(min=1))),
        (ValueError, r"must not decrease, got 9 then 5", whole | dict(cu_seqlens=torch.tensor([0, 9, 5, 16]))),
        (ValueError, r"initial_state must .* \[1, 1, 4, 4\], got \[2,", dict(initial_state=state.expand(2, 1, 4, 4))),
        (ValueError, r"lower_bound must be in \[-5, 0\), got -6", dict(lower_bound=-6)),
        (ValueError, r"nonesuch", dict(backend="nonesuch")),
    ]
    for expected, match, changed in cases:
        with ranks.raises(expected, match):
            kda_over_ranks(**({"shards": balanced} | operands() | changed))
    x, weight = randn(1, 5, 3, seed=1), randn(3, 4, seed=2)
    with ranks.raises(ValueError, r"hidden_states must have at least W - 1 = 3 tokens in each of the 2 pieces.*got 2"):
        short_convs_over_ranks([x[:, :4]], weight, balanced)
    with ranks.raises(ValueError, r"at least W - 1 = 3 tokens in each of the 1 pieces of a rank, got 2"):
        short_convs_over_ranks([x[:, :2]], weight, contiguous)
    with ranks.raises(ValueError, r"hidden_states must have as many tokens in each of 2 pieces.*got T = 5 tokens"):
        short_convs_over_ranks([x], randn(3, 2, seed=2), balanced)
    with ranks.raises(ValueError, r"shards must be contiguous with cu_seqlens"):
        short_convs_over_ranks([torch.cat((x, x), 1)], weight, balanced, torch.tensor([0, 10 * ranks.size]))
    two_pieces = balanced._replace(chain=True)
    for f in (
        lambda: kda_over_ranks(**operands(), shards=two_pieces),
        lambda: short_convs_over_ranks([x], weight, two_pieces),
    ):
        with ranks.raises(ValueError, r"shards must have one piece for each rank with chain=True, got 2"):
            f()
    with ranks.raises(TypeError, r"group must be a torch.distributed.ProcessGroup or None, got str"):
        Shards.contiguous("cp")


# ---------------------------------------------------------------- the short convolution


def convolve(
    T: int, W: int, shards: str, ranks: Ranks, lengths: tuple[int, ...] | None = None, constant: str = "",
    widths: tuple[int, ...] = (3, 3, 5), dtype: torch.dtype = torch.int64,
) -> None:  # fmt: skip
    """The convolution over ranks, and once as a whole. Inputs or the weight (`constant`) may need no gradient."""
    cut_at, total = order(shards), T * ranks.size
    B = 2 if lengths is None else 1
    offsets = None if lengths is None else torch.tensor((0, *itertools.accumulate(lengths)), dtype=dtype)
    xs = [randn(B, total, d, seed=n) for n, d in enumerate(widths)]
    weight = randn(sum(widths), W, seed=9)
    d_ys = [randn(B, total, d, seed=20 + n) for n, d in enumerate(widths)]

    def grads(xs: list[Tensor], f: Any, d_ys: list[Tensor]) -> tuple[Any, ...]:
        xs, w = [t.clone().requires_grad_(constant != "xs") for t in xs], weight.clone()
        w.requires_grad_(constant != "weight")
        ys = f(xs, w)
        sum((y * d).sum() for y, d in zip(ys, d_ys, strict=True)).backward()
        return ys, [t.grad for t in xs], w.grad

    ys, d_xs, d_weight = grads(xs, lambda xs, w: short_convs(xs, w, cu_seqlens=offsets)[0], d_ys)
    mine = [cut(t, cut_at) for t in xs]
    own, d_own, d_w = grads(
        mine, lambda xs, w: short_convs_over_ranks(xs, w, cut_at, offsets), [cut(t, cut_at) for t in d_ys]
    )
    for n, (y, want, d_x, d_want) in enumerate(zip(own, ys, d_own, d_xs, strict=True)):
        ranks.same(f"y {n}", y, cut(want, cut_at))
        ranks.same(f"gradient of x {n}", d_x, None if d_want is None else cut(d_want, cut_at))
    ranks.same("gradient of the weight", ranks.summed(d_w), d_weight)
    starts = lengths is not None and ranks.rank * T in itertools.accumulate(lengths)
    if W > 1 and ranks.rank and not starts:
        alone, _ = short_convs(mine, weight)
        ranks.far("alone", alone[0][:, : W - 1], cut(ys[0], cut_at)[:, : W - 1], MATTERS)


def conv(*args: Any, **options: Any) -> Any:
    return partial(_conv, args, options)


def _conv(args: Any, options: Any, ranks: Ranks) -> None:
    convolve(*args, ranks, **options)


# ---------------------------------------------------------------- all cases

OPTIONS = dict(qk_l2norm=False, scale=0.7)
PACKED = Call(T=24, B=1, shards="chain", without=("initial_state",), final=None)


def packed(*lengths: int, **changed: Any) -> Any:
    return partial(_packed, Call(**(PACKED.__dict__ | dict(lengths=lengths) | changed)))


def _packed(call: Call, ranks: Ranks) -> None:
    for shards in ("chain", "gathered"):
        run(replace(call, shards=shards), ranks)


OF_TWO: dict[str, Any] = {
    "chain": partial(run, Call(shards="chain")),
    "gathered": partial(run, Call(shards="gathered")),
    "balanced": partial(run, Call()),
    "ranks in reverse": partial(run, Call(shards=((1,), (0,)))),
    "several chunks": partial(run, Call(T=140, B=1, H=1, HV=1, options=dict(qk_l2norm=True))),
    "a token in each piece": partial(run, Call(T=2, others_matter=False)),
    "three pieces": partial(run, Call(T=21, shards=((0, 4, 2), (5, 1, 3)))),
    "one row and head": partial(run, Call(B=1, H=1, HV=1, K=8, V=20)),
    "softplus, 2sigmoid": partial(run, Call(gate="softplus", beta="2sigmoid")),
    "log_decay, given": partial(run, Call(gate="log_decay", beta="given", options=OPTIONS, shards="chain")),
    "one gate a head": partial(run, Call(head_gates=True)),
    "one gate a head, chain": partial(run, Call(head_gates=True, gate="softplus", shards="chain")),
    "no bias, no rate": partial(run, Call(without=("A_log", "dt_bias"))),
    "from zero": partial(run, Call(without=("initial_state",))),
    "no final state": partial(run, Call(final=None)),
    "no states": partial(run, Call(final=None, without=("initial_state",))),
    "final state read by none": partial(run, Call(final="none")),
    "final state read by the first rank": partial(run, Call(final="first")),
    "final state read by the last rank": partial(run, Call(final="last", shards="chain")),
    "the loss reads the final state alone": partial(run, Call(final="first", outputs=False)),
    "gradients of v alone": partial(run, Call(constant=("q", "k", "g", "beta", *PARAMETERS))),
    "gradients of the initial state alone": partial(run, Call(constant=(*TOKENS, "A_log", "dt_bias"))),
    "gradients of the rate alone": partial(run, Call(constant=(*TOKENS, "initial_state", "dt_bias"))),
    "no gradient": partial(run, Call(constant=(*TOKENS, *PARAMETERS))),
    "strided inputs": partial(run, Call(strided=True)),
    "fp32": partial(run, Call(dtype=FP32, T=140, B=1)),
    "bf16": partial(run, Call(dtype=BF16, T=140, B=1)),
    "packed: one sequence": packed(48),
    "packed: borders of sequences and ranks": packed(24, 24),
    "packed: across the border": packed(5, 30, 13),
    "packed: int64": packed(5, 30, 13, offsets=torch.int64),
    "packed: two tokens before the border": packed(22, 26),
    "packed: empty ones": packed(0, 0, 10, 0, 14, 0, 0, 16, 8, 0, 0),
    "packed: empty ones inside": packed(7, 0, 30, 0, 0, 11),
    "packed: fp32": packed(5, 40, 3, dtype=FP32),
    "packed: softplus": packed(5, 40, 3, gate="softplus", without=("initial_state", "dt_bias")),
    "no_grad": no_grad,
    "calls in turns": calls_in_turns,
    "replaced inputs": replaced_inputs,
    "second derivative": second_derivative,
    "compiled": compiled,
    "checkpointed": checkpointed,
    "used twice": used_twice,
    "refused": refused,
    "convolution, chain": conv(9, 4, "chain"),
    "convolution, gathered": conv(9, 4, "gathered"),
    "convolution, balanced": conv(10, 4, "balanced"),
    "convolution, one tap": conv(6, 1, "balanced"),
    "convolution, two taps": conv(2, 2, "balanced"),
    "convolution, W - 1 tokens": conv(3, 4, "chain"),
    "convolution, W - 1 tokens in a piece": conv(6, 4, "balanced"),
    "convolution of one tensor": conv(8, 4, "balanced", widths=(4,)),
    "convolution, constant weight": conv(8, 4, "balanced", constant="weight"),
    "convolution, constant inputs": conv(8, 4, "balanced", constant="xs"),
    "convolution, packed": conv(9, 4, "chain", lengths=(5, 10, 3)),
    "convolution, packed, one tap": conv(9, 1, "chain", lengths=(5, 10, 3)),
    "convolution, packed, int32": conv(9, 4, "chain", lengths=(5, 10, 3), dtype=torch.int32),
    "convolution, packed, W - 2 before the border": conv(9, 4, "chain", lengths=(7, 11)),
    "convolution, packed, 1 before the border": conv(9, 4, "chain", lengths=(8, 10)),
    "convolution, packed, borders": conv(9, 4, "chain", lengths=(0, 9, 0, 0, 9, 0)),
    "convolution, packed, W - 1 tokens": conv(3, 4, "chain", lengths=(2, 4)),
}


def of_a_subgroup(ranks: Ranks) -> None:
    """Ranks of a group that are not those of the processes."""
    group = dist.new_group([1, 2])
    if ranks.rank:
        for shards in ("balanced", "chain"):
            run(Call(shards=shards), ranks, group)


OF_THREE: dict[str, Any] = {
    "chain": partial(run, Call(shards="chain")),
    "gathered": partial(run, Call(shards="gathered")),
    "balanced": partial(run, Call()),
    "another order": partial(run, Call(shards=((2,), (0,), (1,)))),
    "final state read by the first rank": partial(run, Call(final="first")),
    "chain, final state read by the first rank": partial(run, Call(final="first", shards="chain")),
    "chain, final state read by none": partial(run, Call(final="none", shards="chain")),
    "chain, no states": partial(run, Call(final=None, without=("initial_state",), shards="chain")),
    "a subgroup": of_a_subgroup,
    "packed: not finite": not_finite,
    "packed: one sequence": packed(72),
    "packed: through the second rank": packed(10, 60, 2),
    "packed: borders": packed(24, 24, 24),
    "packed: ends at the second border": packed(10, 38, 24),
    "packed: begins at the first border": packed(24, 40, 8),
    "packed: empty ones at borders": packed(0, 24, 0, 0, 24, 0, 20, 4, 0),
    "packed: one goes on where another ends": packed(10, 20, 30, 12),
    "packed: many": packed(22, 1, 1, 2, 30, 0, 10, 5, 1),
    "convolution, balanced": conv(10, 4, "balanced"),
    "convolution, packed": conv(9, 4, "chain", lengths=(5, 16, 0, 6)),
    "convolution, packed, W - 1 tokens": conv(3, 4, "chain", lengths=(2, 5, 2)),
}
CASES: dict[int, Cases] = {2: OF_TWO, 3: OF_THREE}


@pytest.mark.slow
@pytest.mark.parametrize(("size", "name"), [(size, name) for size, cases in CASES.items() for name in cases])
def test_two_processes_as_one_pass(size: int, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    failures = outcomes(tmp_path_factory, "over_ranks", size, CASES[size])[name]
    assert not failures, "\n".join(failures)


def test_shards_need_a_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"group must belong to an initialised torch\.distributed"):
        Shards.contiguous()


def test_shards_are_read_as_written() -> None:
    for places, chain in ((((0, 3), (1, 2)), False), (((1,), (0,)), True), (((1,), (0,)), False)):
        shards = Shards("group", places, chain)
        assert Shards.read("group", shards.order) == shards
        assert shards.pieces == len(places[0])


def test_a_chain_pays_for_few_ranks_or_many_layers() -> None:
    """A chain costs (ranks - 1) (F + R) once, with R = F / 2; gathering F + 2 R in each layer."""
    assert [chain_pays(ranks, 1) for ranks in (1, 2, 3, 8)] == [True, True, False, False]
    assert [chain_pays(8, layers) for layers in (3, 5, 6, 12)] == [False, False, True, True]

"""Our CUDA kernels: one class, a backend for each family of GPUs; docs/guides/backends.md says which have run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from ...cuda.gpu import OnArchs
from ...cuda.machine import Machine
from ...declarations import OneOf
from ..activations import BETA_CODES, GATE_CODES
from ..contract import (
    ALL_FEATURES,
    HEAD_GATES,
    Backend,
    CommitInputs,
    DecodeInputs,
    Gradients,
    Inputs,
    KDAOutput,
    Names,
    PrefillInputs,
    Problem,
    Widths,
)
from ..cuda import forms, prefill
from ..cuda.backward import gradients, reverse_scan
from ..cuda.decode import decode
from ..cuda.forward import last_tokens, one_role, segments, two_roles
from ..cuda.spec import (
    ALWAYS,
    AUTO,
    TYPES,
    WIDTHS,
    Rows,
    Saved,
    Signature,
    aligned,
    aligned_inputs,
    cut_of,
    unpacked_if_one,
)
from ..slots import prefill_by_forward

CHUNKED = (one_role, reverse_scan, gradients)  # kernels over whole sequences
SPECIAL = (two_roles.variants, segments.variants, reverse_scan.variants_in_segments)  # of some calls


class CudaBackend(OnArchs, Backend):
    """Our kernels on the GPUs of some compute capabilities."""

    features = ALL_FEATURES
    fused = frozenset(("gate", "beta", "qk_l2norm", HEAD_GATES))

    serves = {  # noqa: RUF012
        "dtype": OneOf(*TYPES),
        "widths": Widths(*WIDTHS),
        "gate_activation": Names(*GATE_CODES),
        "beta_activation": Names(*BETA_CODES),
    }

    def more_reasons(self, problem: Problem) -> list[str]:
        arch = next((a for a in self.archs if a.capability == problem.arch), None)
        if arch is None or problem.K not in WIDTHS or problem.decode:
            return []
        if problem.segments and not arch.bulk_copies:
            return [f"segments is 'always', needs a GPU with bulk copies, sm_{arch.capability} has none"]
        kernels = CHUNKED if problem.needs_grad else (one_role,)
        # Variants for gates of heads are left out: few are listed, and they fit wherever those for channels do.
        listed = ((v for v in kernel.variants(arch.capability) if v.K == problem.K) for kernel in kernels)
        variants = ([v for v in of_kernel if not getattr(v, "head_gates", False)] for of_kernel in listed)
        needed = max(min(v.shared_bytes for v in of_kernel) for of_kernel in variants)
        if needed <= arch.shared_bytes:
            return []
        return [
            f"K is {problem.K}, needs {needed} bytes of shared memory, "
            f"a block of sm_{arch.capability} has {arch.shared_bytes}"
        ]

    def variants(self, arch: str) -> Iterable[tuple[str, Mapping[str, str | int]]]:
        mine = [a for a in self.archs if a.target == arch]
        if not mine:
            return
        yield from ((v.source, v.defines) for v in decode.variants())
        yield last_tokens.SOURCE, last_tokens.DEFINES
        yield gradients.SUMS_SOURCE, {}
        most = max(a.shared_bytes for a in mine)
        for variants in (*(kernel.variants for kernel in CHUNKED), *SPECIAL):
            fitting = (v for v in variants(mine[0].capability) if v.shared_bytes <= most)
            yield from ((v.source, v.defines) for v in fitting)

    def forms(self, problem: Problem, B: int, T: int, HV: int) -> list[str]:
        """Return those of the forward; packed sequences are B of T tokens each."""
        if problem.decode:
            return []
        device, dtype, gated = torch.device(problem.device), problem.dtype, problem.gate_activation
        rows = (1, B * T) if problem.packed else (B, T)
        packed = problem.packed and B > 1
        s = Signature(
            device, dtype, dtype, problem.beta_dtype, (*rows, HV // problem.group, problem.K), (*rows, HV, problem.V),
            (B + 1, torch.int32) if packed else None, gated, 0.0, problem.beta_activation, problem.qk_l2norm,
            1.0, problem.has_state, problem.has_state and problem.prefill, problem.checkpoints,
            cut=None if problem.prefill else ALWAYS if problem.segments else AUTO, saves=problem.needs_grad,
            rows=Rows(*(0,) * 8) if problem.prefill else None, head_gates=problem.head_gates,
        )  # fmt: skip
        return forms.explain(s, self.machine.properties(device))

    def saved_like(self, x: Inputs) -> list[Tensor]:
        x = unpacked_if_one(x)
        if self._recomputes(x):
            return []
        return Saved.like(x, cut_of(x) if forms.is_cut(x, self.machine) else None).tensors()

    def forward(self, x: Inputs, save: bool) -> tuple[KDAOutput, list[Tensor]]:
        x = unpacked_if_one(x)
        if save and self._recomputes(x):
            return forms.forward_whole_chunks(x, self.machine), []
        return forms.forward(x, self.machine, save)

    def backward(
        self, x: Inputs, saved: list[Tensor], d_o: Tensor, d_final: Tensor | None, d_checkpoints: Tensor | None
    ) -> Gradients:
        return gradients.gradients(*self._scanned(x, saved, d_o, d_final, d_checkpoints))

    def backward_handing_on(
        self, x: Inputs, saved: list[Tensor], d_o: Tensor, d_final: Tensor, hand_on: Callable[[Tensor], None]
    ) -> Gradients:
        """The scan knows the gradient before the other kernel runs."""
        x, machine, kept, scanned, d_o = self._scanned(x, saved, d_o, d_final, None)
        assert scanned.d_initial is not None, "x has an initial state"
        hand_on(scanned.d_initial)
        return gradients.gradients(x, machine, kept, scanned, d_o)

    def _scanned(
        self, x: Inputs, saved: list[Tensor], d_o: Tensor, d_final: Tensor | None, d_checkpoints: Tensor | None
    ) -> tuple[Inputs, Machine, Saved, reverse_scan.Scanned, Tensor]:
        """Run the reverse scan; return the arguments of the kernel after it."""
        x, d_o, machine = aligned_inputs(unpacked_if_one(x)), aligned(d_o), self.machine
        kept = Saved.of(saved) if saved else forms.recompute(x, machine)
        return x, machine, kept, reverse_scan.reverse_scan(x, machine, kept, d_o, d_final, d_checkpoints), d_o

    def affine_map(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """By the reverse scan: from outputs without gradient, the gradient I of the final state becomes I P^T."""
        x = aligned_inputs(unpacked_if_one(x))
        out, saved = forms.launch(x, self.machine, Signature.of(x, True)._replace(cut=None))
        assert saved is not None
        assert out.final_state is not None
        N, HV, V, K = out.final_state.shape
        one = torch.eye(K, dtype=torch.float32, device=x.v.device).expand(N, HV, V, K).contiguous()
        none = torch.zeros_like(x.v, memory_format=torch.contiguous_format)
        with_state = x._replace(initial_state=out.final_state)  # asks for its gradient; no value is read
        transposed = reverse_scan.reverse_scan(with_state, self.machine, saved, none, one, None).d_initial
        assert transposed is not None
        return transposed.mT, out.final_state

    def initial_gradient(self, x: Inputs, saved: list[Tensor], d_o: Tensor) -> Tensor:
        """By the reverse scan alone."""
        d_initial = self._scanned(x, saved, d_o, None, None)[3].d_initial
        assert d_initial is not None, "x has an initial state"
        return d_initial

    def prefill(self, x: PrefillInputs) -> None:
        if x.state is not None and x.state.dtype != torch.float32:
            prefill_by_forward(self, x)  # the kernel's states are fp32
        else:
            prefill.prefill(x, self.machine)

    def decode(self, x: DecodeInputs) -> Tensor:
        return decode.decode(x, self.machine)

    def verify(self, x: DecodeInputs) -> Tensor:
        return decode.decode(x, self.machine)

    def commit(self, x: CommitInputs) -> None:
        decode.commit(x, self.machine)

    def repeated_decode(self, x: DecodeInputs) -> Callable[[DecodeInputs], Tensor]:
        return partial(decode.decode, machine=self.machine, plan=decode.plan_for(x, self.machine))

    def _recomputes(self, x: Inputs) -> bool:
        """True if the backward runs the forward again instead of reading what it saved."""
        if x.recompute_above in (0.0, 1.0):  # no guard on the shapes while compiling
            return x.recompute_above == 0.0
        return Saved.nbytes(x) > x.recompute_above * self.machine.properties(x.q.device).memory_bytes


BACKENDS = CudaBackend.every()

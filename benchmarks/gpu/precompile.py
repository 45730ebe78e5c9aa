"""Compile the configurations of flash-linear-attention's autotuners in parallel processes.

An autotuner compiles its configurations one after another before it times them, which takes minutes for one head count.
Triton keeps compiled kernels on disk, so processes that launch nothing compile a share each. The autotuners then find
them there, and time every configuration as they always do: which one they choose does not change.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import Case, Sizes, make_inputs
from benchmarks.gpu.peers import fla_forward, fla_training
from benchmarks.gpu.truth import upstream

ROOT = Path(__file__).parents[2]
# Of the call that compiles. The kernels that normalise q and k are compiled and tuned for each cdiv(T * H, 65536), all
# others for any T.
TOKENS = 256


@contextlib.contextmanager
def compiling(share: int, of: int) -> Iterator[list[str]]:
    """Triton launches nothing: autotuners compile every `of`-th configuration, from number `share` on.

    Yields the names of the kernels whose configurations this process has compiled, one for each configuration.
    """
    from triton.compiler.errors import CompileTimeAssertionFailure
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.errors import OutOfResources, PTXASError
    from triton.runtime.jit import JITFunction

    launch, tune = JITFunction.run, Autotuner.run
    numbers, seen, compiled = itertools.count(), set(), list[str]()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    def compile_share(self: Any, *args: Any, **kwargs: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        named = self.nargs | {n: v for n, v in kwargs.items() if n in self.arg_names}
        dtypes = (str(v.dtype) for v in named.values() if hasattr(v, "dtype"))
        key = (id(self), *(named.get(n) for n in self.keys), *dtypes)
        if key in seen:
            return
        seen.add(key)
        for config in self.prune_configs(kwargs):
            if next(numbers) % of != share:
                continue
            compiled.append(self.base_fn.__name__)
            # The autotuner leaves out these, too.
            with contextlib.suppress(OutOfResources, CompileTimeAssertionFailure, PTXASError):
                self.fn.run(*args, **kwargs, **config.all_kwargs())

    JITFunction.run, Autotuner.run = compile_only, compile_share
    try:
        yield compiled
    finally:
        JITFunction.run, Autotuner.run = launch, tune


def cases_of(sections: Sequence[str], sizes: Sizes) -> dict[str, list[Case]]:
    """Return the cases of sections that run whole sequences of flash-linear-attention, by pass."""
    context = [Case(1, T, sizes.context_heads) for T in sizes.context]
    of_section = {
        "forward": {s: getattr(sizes, s) for s in ("forward", "packed", "gdn_forward")},
        "training": {s: getattr(sizes, s) for s in ("training", "gdn_training")} | {"context": context},
    }
    return {pass_: [c for s in sections for c in found.get(s, ())] for pass_, found in of_section.items()}


def compile_fla(cases: dict[str, list[Case]], device: str = "cuda") -> None:
    """Call what is timed of flash-linear-attention, with few tokens, once for each kind of case."""
    from fla.modules.norm.l2norm import l2norm_bwd, l2norm_fwd

    for pass_, of_pass in cases.items():
        for rows in dict.fromkeys(c.B * c.T * c.H for c in of_pass if not c.given):
            row = make_inputs(Case(1, 1, 1), device).q[0, 0, 0]  # expanded: the processes share the GPU's memory
            y, rstd = l2norm_fwd(row.expand(rows, -1))
            if pass_ == "training":
                l2norm_bwd(y, rstd, row.float().expand(rows, -1))
        for case in dict.fromkeys(map(_few_tokens, of_pass)):
            x = make_inputs(case, device)
            peer = fla_training(x, upstream(x)) if pass_ == "training" else fla_forward(x)
            peer.prepare().run()


def _few_tokens(case: Case) -> Case:
    """The case that compiles the same kernels."""
    lengths = (TOKENS // 2,) * 2 if case.lengths else ()
    return replace(case, B=1, T=TOKENS, gates="slow", lengths=lengths, states=False, kept=False)


def in_processes(processes: int, cases: dict[str, list[Case]]) -> tuple[float, list[str]]:
    """Compile in so many processes; the seconds that it took, and the last lines of those that failed."""
    start = time.monotonic()
    listed = {pass_: [asdict(c) for c in of_pass] for pass_, of_pass in cases.items()}
    command = [sys.executable, "-m", "benchmarks.gpu.precompile", "--cases", json.dumps(listed)]
    command += ["--of", str(processes), "--share"]
    running = [
        subprocess.Popen([*command, str(i)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for i in range(processes)
    ]
    errors = [process.communicate()[1] for process in running]
    failed = [e.strip().rpartition("\n")[2] for e, p in zip(errors, running, strict=True) if p.returncode]
    return time.monotonic() - start, failed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.precompile", description="Compile a share.")
    parser.add_argument("--cases", type=_cases, required=True, help="by pass, as `in_processes` writes them")
    parser.add_argument("--share", type=int, required=True, help="number of this process")
    parser.add_argument("--of", type=int, required=True, help="number of processes")
    args = parser.parse_args(argv)
    with compiling(args.share, args.of) as compiled:
        compile_fla(args.cases)
    print(len(compiled))
    return 0


def _cases(text: str) -> dict[str, list[Case]]:
    listed = json.loads(text).items()
    return {pass_: [Case(**d | {"lengths": tuple(d["lengths"])}) for d in of_pass] for pass_, of_pass in listed}


if __name__ == "__main__":
    sys.exit(main())

"""Runs one case of a kernel in the emulator and prints its errors; see README.md."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tests import cuda_emulator

PROGRAM = "python -m tests.cuda_emulator"
PACKAGE = Path(__file__).parents[2] / "kda_layers"


def parser() -> argparse.ArgumentParser:
    from tests.cuda_emulator.kernels import ARCHS, BETAS, DTYPES, GATES

    p = argparse.ArgumentParser(PROGRAM, description="Run one case of a kernel on the CPU, against fp64.")
    p.add_argument("kernel", choices=("forward", "backward", "decode"))
    p.add_argument("--T", type=int, help="tokens of each sequence (130; decode: 1)")
    p.add_argument("--lengths", type=_numbers, help="tokens of packed sequences, as 65,0,130, instead of T and B")
    p.add_argument("--B", type=int, default=1, help="sequences (%(default)s)")
    p.add_argument("--H", type=int, default=2, help="heads of q and k (%(default)s)")
    p.add_argument("--group", type=int, default=1, help="value heads of each (%(default)s)")
    p.add_argument("--K", type=int, default=128, choices=(64, 128), help="channels of q, k and v (%(default)s)")
    p.add_argument("--gate", choices=GATES, default=GATES[0], help="activation of the gate (%(default)s)")
    p.add_argument("--slow", action="store_true", help="gates that remember long, not ones that soon forget")
    p.add_argument("--beta", choices=BETAS, default="sigmoid", help="activation of beta (%(default)s)")
    p.add_argument("--dtype", choices=DTYPES, default="bf16", help="(%(default)s)")
    p.add_argument("--state", action="store_true", help="start from a state (decode always does)")
    p.add_argument("--draws", type=int, help="how often inputs are drawn (1; backward: 4)")
    p.add_argument(
        "--arch", type=int, choices=ARCHS, default=90, help="form of the kernel (%(default)s; no matter to decode)"
    )
    p.add_argument("--processors", type=int, default=16, help="multiprocessors, which decide on the grid (%(default)s)")
    p.add_argument("--seed", type=int, default=0, help="the schedule (%(default)s)")
    p.add_argument("--seeds", type=int, default=1, help="try so many schedules, from --seed on (%(default)s)")
    p.add_argument("--order", action="store_true", help="check that fences and barriers order all accesses (slower)")
    p.add_argument("--debug", action="store_true", help="compile for a debugger")
    p.add_argument("--gdb", action="store_true", help="run in gdb, which stops where the emulator refuses something")
    return p


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(","))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 if every result is within budget with every seed."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(arguments)
    if why_not := cuda_emulator.unavailable():
        print(why_not, file=sys.stderr)
        return 2
    if options.gdb:
        return run_in_gdb([a for a in arguments if a != "--gdb"])
    with cuda_emulator.order_checked(options.order), cuda_emulator.debuggable(options.debug):
        return run_seeds(options, arguments)


def run_seeds(options: argparse.Namespace, arguments: list[str]) -> int:
    from tests.cuda_emulator.kernels import DTYPES, Case, Trial

    decodes = options.kernel == "decode"
    case = Case(
        T=options.T or (1 if decodes else 130), B=options.B, H=options.H, group=options.group,
        K=options.K, V=options.K, dtype=DTYPES[options.dtype], gate=options.gate, slow=options.slow,
        beta=options.beta, lengths=options.lengths, state=options.state or decodes, checkpoints=not decodes,
    )  # fmt: skip
    print(f"{options.kernel}, {case}" + ("" if decodes else f", sm_{options.arch}"))
    trial = Trial(options.kernel, case, options.draws)
    for seed in range(options.seed, options.seed + options.seeds):
        try:
            judged = trial.run(seed, options.arch, options.processors)
        except cuda_emulator.EmulatorError as refused:
            print(f"seed {seed}: {refused}\n{replay(arguments, seed)}")
            return 1
        print(f"seed {seed}:")
        for name, result in judged.items():
            verdict = "" if result.passes else "  too large"
            print(f"  {name:16s} error {result.error:.2e}  budget {result.budget:.2e}{verdict}")
        if not all(result.passes for result in judged.values()):
            print(replay(arguments, seed))
            return 1
    return 0


def replay(arguments: list[str], seed: int) -> str:
    """The command lines that run one schedule again."""
    kept, rest = [], iter(arguments)
    for argument in rest:
        if argument in ("--seed", "--seeds"):
            next(rest)
        elif not argument.startswith(("--seed=", "--seeds=")):
            kept.append(argument)
    line = shlex.join([*PROGRAM.split(), *kept, "--seed", str(seed)])
    return f"replay: {line}\ndebug:  {line} --gdb"


def run_in_gdb(arguments: list[str]) -> int:
    """Become gdb, which runs the same command line with a breakpoint at the emulator's failures."""
    program = [sys.executable, "-m", "tests.cuda_emulator", *arguments, "--debug"]
    if not shutil.which("gdb"):
        print(
            f"gdb is not installed; install it, or attach another debugger to: {shlex.join(program)}", file=sys.stderr
        )
        return 2
    # The folder in which the sources were compiled is gone.
    folders = sorted({path.parent for path in PACKAGE.rglob("*.cu*")})
    sources = f"directory {shlex.join(map(str, (cuda_emulator.HERE, *folders)))}"
    stops = [sources, "set breakpoint pending on", "break emulator::fail_plainly", "run"]
    os.execvp("gdb", ["gdb", "-quiet", *(word for stop in stops for word in ("-ex", stop)), "--args", *program])


if __name__ == "__main__":
    sys.exit(main())

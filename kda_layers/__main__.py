"""`python -m kda_layers`: print versions, device, and whether each backend serves the default problem, or why not.

`--precompile` compiles all CUDA kernels for this machine's GPUs, which are otherwise compiled on first use;
`--resources` lists the registers and memory of each kernel.
"""

from __future__ import annotations

import argparse
import platform
import signal

import torch

import kda_layers
from kda_layers import versions
from kda_layers.kernels.cuda import toolchain
from kda_layers.kernels.registry import registries


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kda_layers", description="What this machine can run, and why.")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--precompile", action="store_true", help="compile all CUDA kernels instead")
    what.add_argument("--resources", action="store_true", help="list registers and memory of all CUDA kernels instead")
    parser.add_argument("--arch", nargs="+", choices=toolchain.TARGETS, help="for these, not for this machine's GPUs")
    commands = parser.add_subparsers(dest="command", metavar="explain FOLDER")
    explain = commands.add_parser("explain", help="say which paths the model of a checkpoint takes here, and why")
    explain.add_argument("folder", help="of the checkpoint")
    args = parser.parse_args()
    if args.command:
        if args.precompile or args.resources or args.arch:
            parser.error("explain takes a folder alone, without --precompile, --resources and --arch")
        try:
            return explain_checkpoint(args.folder)
        except (ImportError, OSError, ValueError) as error:  # no transformers, no checkpoint, no model that it knows
            parser.exit(1, f"{parser.prog}: error: cannot explain {args.folder}: {error}\n")
    try:
        toolchain.cache_folder()
    except (ValueError, RuntimeError) as error:  # RuntimeError: this user has no home
        parser.error(str(error))
    if not (args.precompile or args.resources):
        if args.arch:
            parser.error("--arch is for --precompile and --resources")
        return describe()
    archs = args.arch or toolchain.archs_here()
    if not archs:
        parser.error(f"there is no GPU here to compile for, --arch names some: {' '.join(toolchain.TARGETS)}")
    try:
        print((toolchain.precompile if args.precompile else toolchain.resources)(archs))
    except RuntimeError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")


def explain_checkpoint(folder: str) -> None:
    """Load a checkpoint, swapped and on the GPU if possible, and print `kda_layers.explain` of it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from kda_layers.modeling.swap import families

    swaps = AutoConfig.from_pretrained(folder).model_type in families.IN_PLACE
    model = (kda_layers.load_pretrained if swaps else AutoModelForCausalLM.from_pretrained)(folder)
    print(kda_layers.explain(model.cuda() if torch.cuda.is_available() else model))


def describe() -> None:
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        device = f"{torch.cuda.get_device_name()} (sm_{major}{minor}), CUDA {torch.version.cuda}"
    else:
        device = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    print(f"kda_layers {kda_layers.__version__}, Python {platform.python_version()}")
    others = ", ".join(f"{p} {'.'.join(map(str, versions.tested(p)[-1:]))}" for p in ("torch", "transformers"))
    transformers = ".".join(map(str, versions.installed("transformers"))) or "not installed"
    print(f"torch {torch.__version__}, transformers {transformers} (newest tested: {others})")
    print(f"device: {device}")
    for operator in registries():
        print(operator.explain(operator.problem.default()))
    print(f"CUDA toolchain: {toolchain.explain()}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly under `| head`, as other commands do
    main()

"""`kda_layers.explain`: which paths the calls of a model take, and every reason against the faster ones."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kda_layers.kernels import registry
from kda_layers.kernels.kda.contract import CHUNK, KDA
from kda_layers.kernels.torch_private import has_global_hooks
from kda_layers.kernels.tracing import autocasts
from kda_layers.modeling.layer.fast_paths import FastPath, Reason, SupposedCall, name_of

NUMBER = re.compile(r"(\D*)(\d*)(.*)")
# Name of a kind of call -> the fields of `SupposedCall` and of the problem of `kda` that it has.
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "prefill": (dict(tokens=CHUNK), {}),
    "decode": (dict(tokens=1), dict(decode=True, has_state=True)),
    "training": (dict(tokens=CHUNK, grad=True, records=True), dict(needs_grad=True)),
}


def explain(what: Any = None, **options: Any) -> str:
    """Say what calls run on, and every reason against what is faster.

    Args:
        what: a model or a `KimiDeltaAttention`: for each of its modules, the paths of prefill, decode step, training
            step and `generate`. Nothing is run: the calls are supposed to be made now, under the current autocast and
            global hooks, on the device and in the dtype of the parameters, with a cache except in training, without
            padding. Or a problem of an operator (None: a training step of a KDA layer in bf16 on the best device here):
            for each backend whether it serves it.
        options: of a model arguments of `generate`, in place of those of model.generation_config: they decide whether
            its loop runs on the device, and its steps from a CUDA graph. Of a problem of `kda` the sizes B, T and HV,
            for which the forms of its kernels are then listed.

    Raises:
        TypeError: `what` is something else; options that neither `generate` nor a problem has.
    """
    return _explain_model(what, options) if isinstance(what, nn.Module) else registry.explain(what, **options)


def _explain_model(model: nn.Module, generation: dict[str, Any]) -> str:
    compiled = hasattr(model, "_orig_mod") or model._compiled_call_impl is not None
    model = getattr(model, "_orig_mod", model)
    config = getattr(model, "generation_config", None)
    if config is None and generation:
        raise TypeError(
            f"options must be left out for a {type(model).__name__}, which has no generate, got {', '.join(generation)}"
        )
    if unknown := [name for name in generation if not hasattr(config, name)]:
        raise TypeError(f"options must be arguments of {type(model).__name__}.generate, got {', '.join(unknown)}")
    if config is not None:
        config = copy.deepcopy(config)
        config.update(**generation)
    # The largest parameter: A_log and dt_bias, which may come first, stay in fp32.
    largest = max((p for p in model.parameters() if p.is_floating_point()), key=Tensor.numel, default=torch.empty(0))
    device, dtype = largest.device, largest.dtype
    facts = dict(compiling=compiled, autocast=autocasts(device.type), global_hooks=has_global_hooks())
    lines = [f"{type(model).__name__} on {device}, {name_of(dtype)}" + ", compiled" * compiled]
    for name, (fields, of_problem) in CALLS.items():
        call = SupposedCall(device, dtype, **facts | fields)
        with torch.set_grad_enabled(call.grad or call.records):  # on which forwards of tensor parallelism depend
            lines += [f"{name}:", *_backends(model, call, of_problem), *_paths(model, call, config)]
    if config is None or not hasattr(model, "fast_paths"):
        lines.append(f"generate and the loss of {type(model).__name__} are its own: decode steps are not captured")
    return "\n".join(lines)


def _backends(model: nn.Module, call: SupposedCall, fields: dict[str, Any]) -> Iterator[str]:
    """Yield the backend of `kda` that the layers' calls choose, with what is against those that rank higher."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, layer in model.named_modules():
        if not hasattr(layer, "kda_options"):
            continue
        problem = layer.problem(call.device, call.dtype, **fields)
        try:
            chosen = KDA.select(problem, layer.kda_options.get("backend")).name
        except ValueError as error:
            found.setdefault((f"none: {error}",), []).append(name)
            continue
        names = list(KDA.backends())
        above = names[: names.index(chosen)]
        refusals = (f"{n} refuses: {'; '.join(KDA.backend(n).unsupported(problem))}" for n in above)
        found.setdefault((chosen, *refusals), []).append(name)
    for (chosen, *refused), layers in found.items():
        yield f"  kda runs on {chosen} ({_listed(layers)})"
        yield from (f"    {reason}" for reason in refused)


def _paths(model: nn.Module, call: SupposedCall, config: Any) -> Iterator[str]:
    """Yield each path with the modules that take it, then those that do not and the reasons."""
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[tuple[FastPath, tuple[str, ...]], list[str]] = {}  # reasons name modules; none: the path is taken
    for name, module in model.named_modules():
        if not hasattr(module, "fast_paths"):
            continue
        of_model = (config,) if hasattr(module, "generate") else ()
        for path, facts in module.fast_paths(call, *of_model):
            reasons = tuple(dict.fromkeys(_named(r, names) for r in path.reasons(call, *facts)))
            found.setdefault((path, reasons), []).append(name)
    for (path, reasons), modules in found.items():
        verdict = f"not taken, {path.instead} instead" if reasons else "taken"
        yield f"  {path.name}: {verdict} ({_listed(modules)})"
        yield from (f"    {reason}" for reason in reasons)


def _named(reason: Reason, names: dict[int, str]) -> str:
    where = "" if reason.module is None else f"{names.get(id(reason.module), type(reason.module).__name__)} "
    return f"{where}{reason}"


def _listed(names: list[str]) -> str:
    """Return the names of modules, those that differ in one number as a range: model.layers.0-3.mlp."""
    groups: dict[tuple[str, str], list[int]] = {}
    for name in dict.fromkeys(names):
        before, number, after = NUMBER.findall(name)[0]
        groups.setdefault((before, after), []).append(int(number or -1))
    listed = []
    for (before, after), numbers in groups.items():
        runs = itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
        ranges = [[n for _, n in run] for _, run in runs]  # numbers that follow each other
        written = ",".join(f"{r[0]}" if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in ranges)
        listed.append(f"{before}{'' if numbers == [-1] else written}{after}" or "the model")
    return ", ".join(listed)

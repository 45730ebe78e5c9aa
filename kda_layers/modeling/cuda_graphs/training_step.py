"""A training step as one CUDA graph: forward, backward, clipping and optimizer are launched at once."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kda_layers.modeling.checks import as_int
from kda_layers.modeling.cuda_graphs.capture import CONSTANTS, CudaGraphs
from kda_layers.modeling.cuda_graphs.clipping import clip_grad_norm_
from kda_layers.modeling.layer.weights import MergedWeights

Batch = Mapping[str, Any]
# Classes that reduce gradients by hooks or shard parameters; by name, as torch.distributed is slow to import.
WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
AGAIN = "build another CapturedStep after such a change"


class NotCapturable(RuntimeError):
    """Raised for a step that no CUDA graph can hold, and that was not taken."""


class CapturedStep:
    """A training step that is captured in one CUDA graph and replayed: the GPU no longer waits for the host.

    A call does what this code does, bit for bit with the same optimizer, from the first call on:

    ```python
    optimizer.zero_grad()
    for batch in batches:
        loss = loss_of(**batch) / len(batches)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    ```

    A training loop:

    ```python
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)
    step = kda_layers.training.CapturedStep(model, optimizer, max_norm=1.0)
    for tokens in loader:
        loss = step(dict(input_ids=tokens, labels=tokens, use_cache=False))
        scheduler.step()
    ```

    The first `warmup` calls run eagerly: they compile, tune and make the optimizer's state. The next call captures, and
    from then on Python runs no more: hooks, prints and branches are those of the capture. State that the model
    keeps, as BatchNorm does, must be updated in place. Dropout and what else draws from torch's default generator
    draws as in an eager step; other generators are not supported.

    Learning rates are read at every call, so schedulers work, and may be numbers or tensors; the optimizer gets them as
    tensors on the GPU, a number in fp32. Other options of the optimizer are constants.

    After a call, `.grad` holds the gradients of the step, clipped; the next call overwrites them. The graph holds the
    addresses of parameters, buffers and optimizer state: load checkpoints before the first call. The layers of this
    package do not move their weights afterwards, so generate once before the first call if the model is to generate at
    full speed in the same process.

    Supported: modules on one GPU, also compiled (not with mode="reduce-overhead", which has graphs of its own), and
    checkpointed (with `preserve_rng_state=False`). transformers' own models with SDPA attention make a mask while
    they are captured, with which SDPA takes another kernel than in an eager step, slower and with other bits; models
    of this package do not. Not supported: DataParallel, DDP, FSDP and tensor parallelism, several GPUs, and
    GradScaler, which bfloat16 does not need.

    Args:
        model: module on a CUDA device.
        optimizer: torch optimizer over its parameters with capturable=True, as AdamW, Adam, NAdam, RAdam or RMSprop.
        loss_of: function that takes the items of a batch as keyword arguments and returns the loss, a tensor with one
            element; None for `model(**batch).loss`. Autocast belongs in here.
        max_norm: largest norm of all gradients of `model`, to which they are clipped; None for no clipping.
        warmup: eager calls before the capture, 1 or more.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: a model that is not on one CUDA device or is parallel, an optimizer that is not capturable, another
            option out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss_of: Callable[..., Tensor] | None = None,
        max_norm: float | None = None,
        warmup: int = 3,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.max_norm, self.warmup = max_norm, as_int("warmup", warmup)
        self._loss_of = self._loss_of_model if loss_of is None else loss_of
        device = _check_arguments(model, optimizer, loss_of, max_norm, self.warmup)
        self._graphs = CudaGraphs(device)  # first: on a CPU no optimizer helps
        _check_capturable(optimizer)
        self._parameters = list(dict.fromkeys([*model.parameters(), *_optimized(optimizer)]))
        self._rates = [
            torch.zeros((), dtype=getattr(group["lr"], "dtype", torch.float32), device=device)
            for group in optimizer.param_groups
        ]
        self._calls = 0
        self._inputs: list[dict[str, Any]] = []
        self._loss: Tensor | None = None
        self._norm: Tensor | None = None
        self._replay: Callable[[], None] | None = None
        self._replaced: list[str] = []  # buffers that the last eager step replaced
        self._captured: dict[str, Any] = {}  # name -> what the graph holds
        self._captured_state: Any = None
        self._addresses: dict[str, tuple[Tensor, int]] = {}

    @property
    def captured(self) -> bool:
        """True once a call has captured the graph."""
        return self._replay is not None

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of the gradients of the last call before clipping, overwritten by the next; None without clipping."""
        return self._norm

    def __call__(self, *batches: Batch) -> Tensor:
        """Take one optimizer step and return its loss.

        Args:
            batches: arguments of `loss_of` by name: tensors on the model's device, or constants (numbers, strings,
                None). Several are accumulated: the gradients are those of the mean of their losses. Number, names,
                shapes, dtypes and constants must be those of the first call; a tensor's elements may differ.

        Returns:
            The loss, or the mean of the losses, a tensor of its own without gradient. Reading it waits for the GPU.

        Raises:
            TypeError: a batch that is not a mapping, or an item that is neither a tensor nor a constant.
            ValueError: batches that differ from those of the first call, a tensor on another device, a loss that is
                not one element with a gradient.
            RuntimeError: a step that cannot be captured; a model or an optimizer that was changed since the capture.
        """
        if len(self.optimizer.param_groups) != len(self._rates):
            raise RuntimeError(
                f"optimizer must have the {len(self._rates)} param groups it was given with, got "
                f"{len(self.optimizer.param_groups)}: {AGAIN}"
            )
        if self.captured:
            self._check_unchanged()
        check_batches(batches, self._inputs if self._calls else (), self._graphs.device)
        if self._calls:
            for held, batch in zip(self._inputs, batches, strict=True):
                for name, value in held.items():
                    if isinstance(value, Tensor):
                        value.copy_(batch[name].detach())
        else:
            self._inputs = [{name: _held(value) for name, value in batch.items()} for batch in batches]
            self._fix_weights()
        self._read_rates()
        if self._calls < self.warmup:
            self._warm_up()
        else:
            if not self.captured:
                self._capture()
            self._replay()
        torch.clear_autocast_cache()  # casts of the weights before this step
        self._calls += 1
        return self._loss.clone()

    # ------------------------------------------------------------ the step

    def _loss_of_model(self, **batch: Any) -> Tensor:
        loss = getattr(self.model(**batch), "loss", None)
        if loss is None:
            raise ValueError(
                f"batches must hold what {type(self.model).__name__} computes its loss from, such as labels, got "
                f"{', '.join(batch)}; or pass loss_of"
            )
        return loss

    def _compute(self) -> None:
        """Compute the step of the inputs that are held; a graph records this."""
        self._drop_gradients()
        torch.clear_autocast_cache()  # of an enclosing autocast: a cast made elsewhere would be a constant here
        total = None
        for batch in self._inputs:
            loss = self._loss_of(**batch)
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                found = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                raise ValueError(f"loss_of must return a tensor with one element and a gradient, got {found}")
            if len(self._inputs) > 1:
                loss = loss / len(self._inputs)
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        if self.max_norm is not None:
            self._norm = clip_grad_norm_(self.model.parameters(), self.max_norm)
        self._update()
        self._loss = total

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _warm_up(self) -> None:
        before = dict(self.model.named_buffers())
        self._graphs.run_aside(self._compute)
        after = dict(self.model.named_buffers())
        self._replaced = [name for name in after if after[name] is not before.get(name)]

    def _capture(self) -> None:
        if self._replaced:
            raise NotCapturable(
                f"model must update its buffers in place, as a graph holds their addresses, but its forward replaced "
                f"{', '.join(self._replaced)}: write to them with copy_ or another function that ends in _"
            )
        self._drop_gradients()  # the graph's own are allocated in its memory
        loss, norm = self._loss, self._norm
        try:
            self._replay = self._graphs.capture(self._compute)
        except Exception as error:
            self._loss, self._norm = loss, norm
            self._drop_gradients()
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise NotCapturable(
                f"the step of {type(self.model).__name__} cannot be captured in a CUDA graph: "
                f"{(str(error).strip() or type(error).__name__).splitlines()[0]}. Model, loss_of and optimizer may not "
                "wait for the GPU or copy from the host: no .item(), .tolist(), .cpu(), `if tensor:`, boolean "
                "indexing or torch.tensor(..., device='cuda'). To find the line, call the step first under "
                "torch.cuda.set_sync_debug_mode('error'). The step was not taken"
            ) from error
        self._captured, self._captured_state = self._constants(), self.optimizer.state
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        self._addresses = {name: (t, t.data_ptr()) for name, t in named}

    # ------------------------------------------------------------ what the graph reads

    @torch.no_grad()
    def _read_rates(self) -> None:
        """Copy the learning rates of the param groups to the tensors that the graph reads."""
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            given = group["lr"]
            rate.copy_(given.reshape(())) if isinstance(given, Tensor) else rate.fill_(given)

    def _update(self) -> None:
        """Take the optimizer's step with learning rates that the graph can read."""
        groups = self.optimizer.param_groups
        given = [group["lr"] for group in groups]
        try:
            for group, rate in zip(groups, self._rates, strict=True):
                group["lr"] = rate
            self.optimizer.step()
        finally:
            for group, rate in zip(groups, given, strict=True):
                group["lr"] = rate

    def _fix_weights(self) -> None:
        """Forbid this package's layers to lay their weights elsewhere at the first inference."""
        for module in self.model.modules():
            for holder in vars(module).values():
                if isinstance(holder, MergedWeights):
                    holder.fixed = True

    def _constants(self) -> dict[str, Any]:
        """Return what a graph holds of Python's state, by name."""
        kind = self._graphs.device.type
        found = {
            "model.training": self.model.training,
            "autocast": torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
        }
        for i, group in enumerate(self.optimizer.param_groups):
            found[f"the number of optimizer.param_groups[{i}]['params']"] = len(group["params"])
            for name in self.optimizer.defaults:
                if name != "lr":
                    found[f"optimizer.param_groups[{i}][{name!r}]"] = group.get(name)
        return found

    def _check_unchanged(self) -> None:
        """Raise a RuntimeError if the graph would no longer compute the step of this model and optimizer."""
        if self.optimizer.state is not self._captured_state:
            raise RuntimeError(f"optimizer.load_state_dict was called after the capture: {AGAIN}")
        for name, now in self._constants().items():
            then = self._captured[name]
            if now is not then and (isinstance(now, Tensor) or isinstance(then, Tensor) or now != then):
                raise RuntimeError(f"{name} must be {then} as in the captured step, got {now}: {AGAIN}")
        for name, (tensor, address) in self._addresses.items():
            if tensor.data_ptr() != address:
                raise RuntimeError(f"{name} of the model has moved since the capture: {AGAIN}")


def _check_arguments(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[..., Tensor] | None,
    max_norm: float | None,
    warmup: int,
) -> torch.device:
    """Raise a TypeError or ValueError that names an argument which cannot be captured; return the model's device."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if loss_of is not None and not callable(loss_of):
        raise TypeError(f"loss_of must be a function or None, got {type(loss_of).__name__}")
    if max_norm is not None:
        if isinstance(max_norm, bool) or not isinstance(max_norm, numbers.Real):
            raise TypeError(f"max_norm must be a number or None, got {type(max_norm).__name__}")
        if not max_norm > 0:
            raise ValueError(f"max_norm must be more than 0, got {max_norm}")
    if warmup < 1:
        raise ValueError(f"warmup must be at least 1, got {warmup}: an eager step makes the optimizer's state")
    _check_not_parallel(model)
    devices = {p.device for p in (*model.parameters(), *_optimized(optimizer))}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "no parameters"
        raise ValueError(f"model and optimizer must have their parameters on one device, got {found}")
    return devices.pop()


def _check_capturable(optimizer: torch.optim.Optimizer) -> None:
    for i, group in enumerate(optimizer.param_groups):
        if not group.get("capturable", False):
            raise ValueError(
                f"optimizer must be capturable, got {type(optimizer).__name__} with param_groups[{i}]['capturable'] "
                f"{group.get('capturable', 'missing')}: build one that can be, with capturable=True, for example "
                "torch.optim.AdamW(model.parameters(), fused=True, capturable=True)"
            )


def _check_not_parallel(model: nn.Module) -> None:
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ in WRAPPERS:
                where = f" at {name}" if name else ""
                raise ValueError(f"model must not be parallel, got {kind.__name__}{where}: take its steps eagerly")
    for name, parameter in model.named_parameters():
        if type(parameter.data).__name__ == "DTensor":
            raise ValueError(f"model must not be parallel, got shards (a DTensor) at {name}: take its steps eagerly")


def _optimized(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (p for group in optimizer.param_groups for p in group["params"])


def check_batches(batches: Sequence[Batch], held: Sequence[Batch], device: torch.device) -> None:
    """Raise a TypeError or ValueError for batches that a graph which reads `held` cannot take.

    `held` is empty before the first step.
    """
    if not held and not batches:
        raise ValueError("batches must be at least one, got none")
    if held and len(batches) != len(held):
        raise ValueError(f"batches must be {len(held)} as in the first call, got {len(batches)}")
    for i, batch in enumerate(batches):
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"batches[{i}] must be a mapping, such as dict(input_ids=..., labels=...), got {type(batch).__name__}"
            )
        first = held[i] if held else batch
        if first.keys() != batch.keys():
            raise ValueError(f"batches[{i}] must hold {', '.join(first)} as in the first call, got {', '.join(batch)}")
        for key, value in batch.items():
            name, want = f"batches[{i}][{key!r}]", first[key]
            if want is not value and _kind(want) != _kind(value):
                raise ValueError(
                    f"{name} must be {_kind(want)} as in the first call, got {_kind(value)}: a graph has one shape. "
                    "Drop or pad incomplete batches, pass what varies as tensors, or build a CapturedStep for each"
                )
            if not isinstance(value, (Tensor, *CONSTANTS)):
                raise TypeError(f"{name} must be a tensor, a number, a string or None, got {type(value).__name__}")
            if isinstance(value, Tensor) and value.device != device:
                raise ValueError(f"{name} must be on {device} as the model, got {value.device}")


def _held(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _kind(value: Any) -> str:
    """Describe what the graph holds of an item: all of a constant, all but the elements of a tensor."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)} on {value.device}"
    return repr(value)

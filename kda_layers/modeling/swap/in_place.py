"""Families whose layers `swap_attention` changes in place: our forward over the stock layer's parameters."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from kda_layers.kernels.kda.contract import KDA
from kda_layers.modeling.checks import is_stock
from kda_layers.modeling.inputs.arguments import rename_cache, takes_cache
from kda_layers.modeling.inputs.keywords import INPUTS, is_checkpointed, is_engine_cache, refuse_misspelt
from kda_layers.modeling.inputs.sequences import Layout, check_positions, read_layout
from kda_layers.modeling.layer.cache import with_kda_layers
from kda_layers.modeling.layer.checkpoint_names import Format
from kda_layers.modeling.layer.forward import KDAForward
from kda_layers.modeling.layer.layer import KimiDeltaAttention
from kda_layers.modeling.layer.states import StateDtypeOfModel
from kda_layers.modeling.layer.weights import KeepsFP32, loads_weights_of
from kda_layers.modeling.parallel.context_parallel import read_shards
from kda_layers.modeling.seams import CACHE, Cache
from kda_layers.modeling.swap import families
from kda_layers.modeling.swap.engine_step import EngineStep, engine_step
from kda_layers.modeling.swap.stock_layer import StockParameters, check_stock_layer, kda_options

logger = logging.getLogger("kda_layers")


class StockForward(StateDtypeOfModel, KDAForward, KeepsFP32):
    """Our forward for calls of a stock layer; a mixin of `StockFamily.layer`.

    A subclass gives the layer's parameters the names that `KDAForward` reads.
    """

    kept_in_fp32 = KimiDeltaAttention.kept_in_fp32

    @takes_cache
    def forward(
        self,
        hidden_states: Tensor,
        cache: Cache | EngineStep | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Map [B, T, D] to [B, T, D], called as the stock layer is.

        Args:
            hidden_states, attention_mask, cache: as in `KimiDeltaAttention.forward`.
            **kwargs: the model's other keywords; only cu_seq_lens_q and shards are read, which `prepare_call` sets.
        """
        if isinstance(cache, EngineStep):
            return self.compute(hidden_states, None, cache.slots, cache.slots.cu_seqlens)
        cu_seqlens, shards = kwargs.get("cu_seq_lens_q"), kwargs.get("shards")
        if cu_seqlens is not None:
            attention_mask = None  # the model made it: `prepare_call` refuses one from the caller
        return self.compute(hidden_states, attention_mask, cache, cu_seqlens, shards)


class StockKDALayer(StockParameters, StockForward):
    """A stock KDA layer with our forward."""

    # The parameters of the forget gate are read here, not in its own forward.
    forward = loads_weights_of("forget_gate")(StockForward.forward)


APART = {"linear_attention", "full_attention", "sliding_attention"}  # layers that keep packed sequences apart
PACKING = ("cu_seqlens", "cu_seq_lens_q", "seq_idx")


def call_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """Return the arguments of a base model's call by name, and its tokens: input_ids, or inputs_embeds [B, T, D].

    Raises:
        TypeError: a misspelt keyword, which would be ignored.
        ValueError: no tokens.
    """
    kwargs = rename_cache(dict(zip(INPUTS, args, strict=False)) | kwargs, CACHE)
    refuse_misspelt(kwargs, type(model))
    positions, ids = kwargs.get("position_ids"), kwargs.get("input_ids")
    if isinstance(positions, Tensor) and positions.ndim == 1:
        kwargs["position_ids"] = positions[None]
    if (tokens := kwargs.get("inputs_embeds") if ids is None else ids) is None:
        raise ValueError("exactly one of input_ids and inputs_embeds must be given")
    return kwargs, tokens


def prepare_call(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    """Pass what KDA layers need and the stock forward of a base model does not pass on; a forward pre-hook.

    A mask of scores becomes one mask per type of layer; for the rest see `prepare_layout`. For calls by transformers'
    continuous batching see `engine_step`.
    """
    if is_engine_cache(kwargs.get("cache")):
        return (), engine_step(model, kwargs)
    kwargs, _, layout = prepare_layout(model, args, kwargs)
    mask = layout.attention_mask
    if isinstance(mask, Tensor) and mask.ndim == 4:
        mask = dict.fromkeys(model.config.layer_types, mask) | {"linear_attention": layout.padding}
    return (), kwargs | {"attention_mask": mask}


prepare_call.reads_shards = True  # type: ignore[attr-defined]  # for `enable_context_parallel`


def prepare_layout(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], Tensor, Layout]:
    """Return the arguments of a call of a base model with KDA layers, its tokens and the layout of its sequences.

    Packed sequences, however described, become cu_seq_lens_q and positions that restart (which separate them in softmax
    layers). A new or empty cache gets layers that can take tokens back and, in a model of KDA layers only, count them.

    Raises:
        TypeError, ValueError: as `call_arguments`; masks or positions that KDA layers cannot follow, see
            `sequences.read_layout` and, under context parallelism, `read_shards`; packed sequences with padding or a
            cache, or in a model whose other layers would mix them.
    """
    kwargs, tokens = call_arguments(model, args, kwargs)
    given = rename_cache(kwargs)
    if getattr(model, "context_group", None) is not None:
        shards, offsets = read_shards(model.context_group, model.config, tokens, given)
        # Masks of no layer: the stock forward would make those of a local sequence.
        masks = dict.fromkeys(model.config.layer_types)
        kwargs = {name: value for name, value in kwargs.items() if name not in PACKING}
        kwargs |= dict(use_cache=False, shards=shards) | ({} if offsets is None else dict(cu_seq_lens_q=offsets))
        return kwargs, tokens, Layout(None, None, None, masks)
    cache = given.get("cache")
    if cache is not None:
        with_kda_layers(cache)
    layout = read_layout(tokens, **given)
    if layout.cu_seqlens is not None:
        kwargs = packed_call(model, kwargs, layout, "linear-attention layer", is_stock)
        mixing = sorted(set(model.config.layer_types) - APART)
        if mixing:
            raise ValueError(
                f"{type(model).__name__} must get one sequence in each row, got {layout.cu_seqlens.shape[0] - 1} "
                f"packed ones: its linear-attention layers keep them apart, but its {mixing[0]} layers do not"
            )
    elif cache is None and not is_checkpointed(model):
        use_cache = kwargs.get("use_cache")
        if model.config.use_cache if use_cache is None else use_cache:
            kwargs[CACHE] = with_kda_layers(DynamicCache(config=model.config))
    return kwargs, tokens, layout


def packed_call(
    model: Any, kwargs: dict[str, Any], layout: Layout, noun: str, is_stock: Callable[[Any], bool]
) -> dict[str, Any]:
    """Return the arguments of a base model's call with packed sequences as swapped layers need them.

    Args:
        kwargs: arguments as the caller gave them.
        noun: name of the layers that must all be swapped, for messages.
        is_stock: tells which modules are such layers, not swapped.

    Raises:
        ValueError: packed sequences with a cache or a stock layer, or positions that jump within one.
    """
    assert layout.cu_seqlens is not None
    assert layout.positions is not None
    N = layout.cu_seqlens.shape[0] - 1
    if kwargs.get(CACHE) is not None or kwargs.get("use_cache"):
        raise ValueError(f"{CACHE} must be None and use_cache unset or False with {N} packed sequences")
    stock = [path for path, m in model.named_modules() if is_stock(m)]
    if stock:
        raise ValueError(
            f"every {noun} of {type(model).__name__} must be swapped for {N} packed sequences, got stock layers at "
            f"{', '.join(stock)}: these would read the packed sequences as one"
        )
    # The stock forward encodes the positions that its masks are made from, so those given must mean the same.
    given, positions = kwargs.get("position_ids"), layout.positions
    check_positions(given, layout)
    if given is not None and given.ndim == 3:  # time, height and width of images, after the positions of tokens
        positions = torch.cat((positions[None], given[-3:]))
    kwargs = {name: value for name, value in kwargs.items() if name not in PACKING}
    return kwargs | dict(cu_seq_lens_q=layout.cu_seqlens, position_ids=positions, use_cache=False)


@dataclass(frozen=True, kw_only=True)
class StockFamily:
    """A family of transformers models with layers that `swap_attention` changes in place.

    It names classes of transformers' modelling file, which is imported when one of them is first used.
    """

    model_type: str  # of transformers, and the name of the family's file
    base_name: str  # class of the module that calls the decoder layers
    stock_name: str  # class of the stock layer
    mixin: type[nn.Module]  # our forward: no __init__, no parameters of its own
    prepare_call: Callable[..., Any]  # forward pre-hook of base_model
    weights: Format | None = None  # names of a KDA layer's weights
    operator: ClassVar[Any]  # that its layers call
    noun: ClassVar[str]  # name of its layers in messages
    recomputes: ClassVar[bool] = False  # its layers have `recompute`
    kept_in_fp32: ClassVar[tuple[str, ...]] = ()  # parameters that `load_pretrained` does not round

    def _stock_class(self, name: str) -> type[nn.Module]:
        folder = f"transformers.models.{self.model_type}"
        return getattr(importlib.import_module(f"{folder}.modeling_{self.model_type}"), name)

    @cached_property
    def base_model(self) -> type[nn.Module]:
        """The class of the module that calls the decoder layers."""
        return self._stock_class(self.base_name)

    @cached_property
    def stock_layer(self) -> type[nn.Module]:
        """The class of the stock layer."""
        return self._stock_class(self.stock_name)

    @cached_property
    def layer(self) -> type[nn.Module]:
        """The class of a swapped layer: a subclass of `stock_layer` with our forward.

        It is set as the class of stock instances, which keep their parameters and checkpoint names.
        """
        attributes = dict(__module__=f"{families.__name__}.{self.model_type}", __doc__=self.mixin.__doc__)
        return type(f"Fast{self.stock_name}", (self.mixin, self.stock_layer), attributes)

    def layer_by_name(self, name: str) -> type[nn.Module]:
        """Return `layer` if that is its name: the `__getattr__` of the family's file, where pickle looks it up."""
        if name == f"Fast{self.stock_name}":
            return self.layer
        raise AttributeError(f"module {families.__name__}.{self.model_type} has no attribute {name!r}")

    def check(self, layer: Any) -> None:
        """Raise a ValueError if our forward cannot compute the layer."""
        raise NotImplementedError

    def attributes(
        self, model: nn.Module, path: str, layer: Any, backend: str | None, **recompute: Any
    ) -> dict[str, Any]:
        """Return the attributes that the swapped layer at `path` has and a stock one has not."""
        raise NotImplementedError

    def warn(self, model: nn.Module, layers: list[Any]) -> None:
        """Log defects of the layers that swapping them cannot repair."""


@dataclass(frozen=True, kw_only=True)
class KDAFamily(StockFamily):
    """A family whose models have KDA layers."""

    lower_bound: Callable[[Any], float | None]  # returns that of a KDA layer's gate; None for softplus
    mixin: type[nn.Module] = StockKDALayer
    prepare_call: Callable[..., Any] = prepare_call
    operator = KDA
    noun = "KDA layer"
    recomputes = True
    kept_in_fp32 = ("A_log", "dt_bias")

    def check(self, layer: Any) -> None:
        check_stock_layer(layer, self.lower_bound(layer))

    def kda_options(self, layer: Any, backend: str | None) -> dict[str, Any]:
        """Return `kda_options` of a swapped layer."""
        return kda_options(self.lower_bound(layer), backend)

    def attributes(
        self, model: nn.Module, path: str, layer: Any, backend: str | None, **recompute: Any
    ) -> dict[str, Any]:
        decoder_layer = model.get_submodule(path.rpartition(".")[0])
        return KDAForward.new_weights() | dict(
            kda_options=self.kda_options(layer, backend),
            model_config=next(m for m in model.modules() if isinstance(m, self.base_model)).config,
            # Stock layers keep tensors, too.
            layers_in_model=sum(isinstance(m, self.stock_layer) for m in model.modules()),
            gradient_checkpointing=getattr(decoder_layer, "gradient_checkpointing", False),
            **recompute,
        )

    def warn(self, model: nn.Module, layers: list[Any]) -> None:
        owner = getattr(layers[0], "forget_gate", layers[0])
        dtypes = {name: getattr(owner, name).dtype for name in self.kept_in_fp32}
        rounded = {name: dtype for name, dtype in dtypes.items() if dtype in (torch.bfloat16, torch.float16)}
        if rounded:  # transformers 5.24 itself keeps dt_bias
            logger.warning(
                "%s of %s were rounded to %s when it was loaded: kda_layers.load_pretrained keeps fp32",
                " and ".join(rounded), type(model).__name__, str(next(iter(rounded.values()))).removeprefix("torch."),
            )  # fmt: skip

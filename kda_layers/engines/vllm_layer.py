"""Layers of ours for vLLM's KDA models, by its interface for layers from outside of its tree (PluggableLayer).

Each is a subclass of vLLM's own layer, which keeps its weights, projections, quantisation and tensor parallelism, and
whose core is replaced: vllm_core.py. A layer that the core cannot serve stays vLLM's, and the log says why.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kda_layers.engines.vllm_core import CHECKPOINTS, Core, Parameters, Tokens, refusals, warm_up
from kda_layers.kernels.kda.cuda.layer_step.layer_step import RANKS

logger = logging.getLogger("vllm.kda_layers")

MOST_FACTORED = 256  # heads of all sequences up to which a decode step multiplies the gates' second factors itself
OPERATOR = "kda_layers_core"  # of torch.ops.vllm, for layers under torch.compile


class Layer:
    """What our layers have in common; a mixin before vLLM's class, whose module has the functions it calls."""

    stock_module: ModuleType
    stock_layer: type[Any]
    core: Core | None = None  # None: vLLM's own layer
    parameters_of: Callable[[Any], Parameters]

    prefix: str
    kv_cache: Any
    head_dim: int
    local_num_heads: int
    conv_size: int
    o_norm: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._parameters_here: tuple[tuple[int, ...], Parameters] | None = None
        self._conv_first = self.stock_module.is_conv_state_dim_first()
        p, dtype = self.parameters_of(), self.model_config.dtype  # type: ignore[attr-defined]
        found = refusals(
            p.conv_weight.device, dtype, type(self).get_state_dtype(self), self.head_dim, self.conv_size, p.lower_bound
        )
        if getattr(self, "use_recoverssm", False):
            found.append("RecoverSSM is on")
        if self.o_norm.activation != "sigmoid":
            found.append(f"its output gate is {self.o_norm.activation}")
        if found:
            _say_once(logging.WARNING, f"kda_layers leaves {self._theirs()} to vLLM: {'; '.join(found)}")
            return
        checkpoints = importlib.import_module("vllm.model_executor.layers.mamba.checkpoint")
        exporter = checkpoints.MambaPrefillCheckpointExporter(state_len=self.conv_size - 1)
        stock = self.stock_module
        self.core = Core(
            self.local_num_heads, self.head_dim, stock.causal_conv1d_fn, stock.causal_conv1d_update, exporter
        )
        _say_once(logging.INFO, f"kda_layers serves {self._theirs()} on vLLM's pools of states")

    def _theirs(self) -> str:
        return f"{self.stock_module.__name__}.{self.stock_layer.__name__}"

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """Return vLLM's specification, with a checkpoint in each prefill at our boundaries."""
        spec = super().get_kv_cache_spec(vllm_config)  # type: ignore[misc]
        if self.core is None:
            return spec
        return dataclasses.replace(spec, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=CHECKPOINTS)

    def bind_kv_cache(self, kv_cache: Any) -> None:
        """Take the pools of states; compile what steps call, before a graph captures them."""
        super().bind_kv_cache(kv_cache)  # type: ignore[misc]
        if self.core is not None:
            warm_up(self.local_num_heads, self.model_config.dtype, self.kv_cache[1], self.core_parameters())  # type: ignore[attr-defined]

    def core_parameters(self) -> Parameters:
        """Return `parameters_of` this layer, made again if a weight has moved."""
        where = tuple(t.data_ptr() for t in self._watched())
        if self._parameters_here is None or self._parameters_here[0] != where:
            self._parameters_here = where, self.parameters_of()
        return self._parameters_here[1]

    def _watched(self) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def metadata(self) -> Any:
        """Return this step's metadata, or None in runs without states: those that measure memory."""
        metadata = self.stock_module.get_forward_context().attn_metadata
        return None if metadata is None else metadata.get(self.prefix)

    def pools(self) -> tuple[Tensor, Tensor]:
        """Return the convolution's states [slots, channels, inputs] and the recurrent ones [slots, H, D, D]."""
        conv, state = self.kv_cache[:2]
        return conv if self._conv_first else conv.transpose(-1, -2), state

    def run_core(self, x: Tokens, out: Tensor) -> bool:
        """Write this step's outputs to out [1, T, H, D]; return True if they are normed, or there is no step."""
        m = self.metadata()
        if m is None:
            return True
        assert self.core is not None
        return self.core.run(m, x, self.core_parameters(), *self.pools(), out)

    def few_decoded(self, tokens: int) -> Any:
        """Return the metadata of a step of a few decoded tokens alone which is not captured in pieces, or None."""
        if self.core is None or tokens * self.local_num_heads > MOST_FACTORED or torch.compiler.is_compiling():
            return None
        context, m = self.stock_module.get_forward_context(), self.metadata()
        if m is None or m.num_prefills or m.num_spec_decodes or m.num_actual_tokens != tokens:
            return None
        return None if getattr(context.cudagraph_runtime_mode, "name", "") == "PIECEWISE" else m


def factor(layer: Any, dtype: torch.dtype) -> Tensor | None:
    """Return the weight [out, in] of a linear layer of vLLM that its decode kernel can read, or None."""
    weight = getattr(layer, "weight", None)
    plain = type(layer.quant_method).__name__ in ("UnquantizedLinearMethod", "KimiK3LowLatencyLinearMethod")
    if not plain or layer.bias is not None or weight is None or weight.ndim != 2 or weight.dtype != dtype:
        return None
    return weight if weight.shape[1] in RANKS and weight.is_contiguous() and weight.data_ptr() % 16 == 0 else None


class KimiLayer(Layer):
    """Kimi-Linear's, AliceAI's and Kimi-K3's: one projection, one convolution."""

    full_rank: bool | None = None  # of the output gate; None: as `use_full_rank_gate` says

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Return dtypes of the two states; Kimi-Linear's own layer leaves --mamba-ssm-cache-dtype out."""
        calculator = self.stock_module.MambaStateDtypeCalculator
        cache = self.cache_config  # type: ignore[attr-defined]
        dtypes: tuple[torch.dtype, ...] = calculator.kda_state_dtype(
            self.model_config.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype  # type: ignore[attr-defined]
        )  # fmt: skip
        return dtypes

    def parameters_of(self) -> Parameters:  # type: ignore[override]
        """Return the parameters of the core."""
        own: Any = self
        return Parameters(
            own.conv1d.weight.flatten(1), own.A_log.view(-1), own.dt_bias.view(-1, self.head_dim),
            self.o_norm.weight, self.o_norm.eps, own.gate_lower_bound,
        )  # fmt: skip

    def _watched(self) -> tuple[Tensor, ...]:
        own: Any = self
        return own.conv1d.weight, own.A_log, own.dt_bias, self.o_norm.weight

    def forward(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        """Return the layer's output [T, hidden]; a few decoded tokens skip the products with the gates' factors."""
        m = self.few_decoded(hidden_states.shape[0])
        weight = None if m is None else factor(self.f_b_proj, hidden_states.dtype)  # type: ignore[attr-defined]
        if weight is None:
            return super().forward(hidden_states, positions)  # type: ignore[misc,no-any-return]
        own: Any = self
        assert self.core is not None
        width, heads = own.local_projection_size, self.local_num_heads
        x = own.in_proj_qkvgfab(hidden_states)[0]
        gate_weight = None
        if self._full_rank():
            qkv, gate, f, beta = x[:, : 4 * width + self.head_dim + heads].split(
                [3 * width, width, self.head_dim, heads], -1
            )
        else:
            qkv, beta, f = x.split([3 * width, heads, self.head_dim], -1)
            gate_weight = factor(own.g_b_proj, hidden_states.dtype)
            gate = own.g_a_proj(hidden_states)[0]
            if gate_weight is None:
                gate = own.g_b_proj(gate)[0]
        out = torch.empty((1, x.shape[0], heads, self.head_dim), dtype=x.dtype, device=x.device)
        slots = m.non_spec_state_indices_tensor[: x.shape[0]]
        conv, state = self.pools()
        factors = weight, gate_weight
        self.core.decode(slots, Tokens(qkv, f, gate, beta), self.core_parameters(), conv, state, out, factors)
        return self._output(out.view(x.shape[0], -1))

    def _full_rank(self) -> bool:
        return bool(getattr(self, "use_full_rank_gate", self.full_rank))

    def _output(self, o: Tensor) -> Tensor:
        own: Any = self
        reduce = getattr(self, "gemm_rs_ar", None)
        if reduce is not None and reduce.should_run(o):
            return reduce.apply(o, own.o_proj)  # type: ignore[no-any-return]
        return own.o_proj(o)[0]  # type: ignore[no-any-return]

    def kda_core(self, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor) -> None:
        """Write the layer's normed outputs to core_attn_out [1, T, H, D]; the name of vLLM's method is `_forward`."""
        x = Tokens(mixed_qkv, g1[0].flatten(1), g2.flatten(1), beta[0])
        if not self.run_core(x, core_attn_out):
            core_attn_out.copy_(self.o_norm(core_attn_out, g2))


class K3Layer(KimiLayer):
    """Kimi-K3's, whose output gate has full rank."""

    full_rank = True


class MergedConvolution(Layer):
    """Layers with three convolutions, whose weights are joined."""

    bound: Callable[[Any], float | None]

    def parameters_of(self) -> Parameters:  # type: ignore[override]
        """Return the parameters of the core."""
        own: Any = self
        taps = [conv.weight.flatten(1) for conv in (own.q_conv1d, own.k_conv1d, own.v_conv1d)]
        return Parameters(
            torch.cat(taps), own.A_log.view(-1), own.dt_bias.view(-1, self.head_dim), self.o_norm.weight,
            self.o_norm.eps, self.bound(),
        )  # fmt: skip

    def _watched(self) -> tuple[Tensor, ...]:
        own: Any = self
        return own.q_conv1d.weight, own.A_log, own.dt_bias, self.o_norm.weight


class GlmLayer(MergedConvolution):
    """GLM-5.3-Flash's."""

    def bound(self) -> float | None:  # type: ignore[override]
        """Return the lower bound of the gate."""
        return self.kda_lower_bound  # type: ignore[attr-defined,no-any-return]

    def forward(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        """Return the layer's output [T, hidden]; vLLM's own norms outside of the core."""
        if self.core is None:
            return super().forward(hidden_states, positions)  # type: ignore[misc,no-any-return]
        own: Any = self
        width, heads, D = own.local_projection_size, self.local_num_heads, self.head_dim
        qkv, beta, f, gate = own.in_proj_qkvbfg_a(hidden_states)[0].split([3 * width, heads, D, D], -1)
        f, gate = own.f_b_proj(f)[0], own.g_b_proj(gate)[0]
        out = torch.empty((1, qkv.shape[0], heads, D), dtype=qkv.dtype, device=qkv.device)
        own.kda_normed(qkv, f, gate, beta, out)
        return own.o_proj(out.view(out.shape[1], -1))[0]  # type: ignore[no-any-return]

    def kda_core(self, qkv: Tensor, f: Tensor, gate: Tensor, beta: Tensor, out: Tensor) -> None:
        """Write the layer's normed outputs to out [1, T, H, D]."""
        if not self.run_core(Tokens(qkv, f, gate, beta), out):
            out.copy_(self.o_norm(out, gate.view(out.shape[1:])))


class LingLayer(MergedConvolution):
    """Ling's, under torch.compile: the core is an operator that splits the graph."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.core is None:
            return
        splits = self.stock_module.get_current_vllm_config().compilation_config.splitting_ops
        if splits is not None and f"vllm::{OPERATOR}" not in splits:
            splits.append(f"vllm::{OPERATOR}")

    def bound(self) -> float | None:  # type: ignore[override]
        """Return the lower bound of the gate, None for softplus."""
        own: Any = self
        return own.lower_bound if own.safe_gate else None

    def forward(self, hidden_states: Tensor, positions: Tensor, output: Tensor) -> None:
        """Write the layer's output to output [T, hidden]; the gates' activations are the core's."""
        if self.core is None:
            super().forward(hidden_states, positions, output)  # type: ignore[misc]
            return
        own: Any = self
        width, heads, D = own.projection_size_per_partition, self.local_num_heads, self.head_dim
        if own.separate_b_proj:
            qkv, beta = own.qkv_proj(hidden_states)[0], own.b_proj(hidden_states)[0]
        else:
            qkv, beta = own.qkvb_proj(hidden_states)[0].split([3 * width, heads], -1)
        f, gate = own.f_proj(hidden_states)[0], own.g_proj(hidden_states)[0]
        out = torch.zeros((1, qkv.shape[0], heads, D), dtype=qkv.dtype, device=qkv.device)
        getattr(torch.ops.vllm, OPERATOR)(qkv, f, gate, beta, out, self.prefix)
        output[:] = own.o_proj(out.view(out.shape[1], -1))[0]

    kda_core = GlmLayer.kda_core


def _operator(stock: ModuleType) -> None:
    """Define torch.ops.vllm.kda_layers_core, which runs the core of a layer by its name."""

    def kda_layers_core(
        qkv: torch.Tensor, f: torch.Tensor, gate: torch.Tensor, beta: torch.Tensor, out: torch.Tensor, layer_name: str
    ) -> None:
        stock.get_forward_context().no_compile_layers[layer_name].kda_core(qkv, f, gate, beta, out)

    # vLLM reads the types of the arguments from the signature, where they must not be strings.
    tensor = torch.Tensor
    names = ("qkv", "f", "gate", "beta", "out")
    kda_layers_core.__annotations__ = dict.fromkeys(names, tensor) | dict(layer_name=str) | {"return": None}
    stock.direct_register_custom_op(op_name=OPERATOR, op_func=kda_layers_core, mutates_args=["out"])


# Modules of vLLM, its layer there, the arguments of its core, and ours.
LAYERS: dict[str, tuple[str, tuple[str, ...], type[Layer]]] = {
    "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn": (
        "KimiGatedDeltaNetAttention", ("mixed_qkv", "g1", "g2", "beta", "core_attn_out"), KimiLayer,
    ),
    "vllm.models.kimi_k3.nvidia.kda": (
        "KimiK3DeltaAttention", ("mixed_qkv", "g1", "g2", "beta", "core_attn_out"), K3Layer,
    ),
    "vllm.models.glm5next.common.kda": (
        "Glm5NextLinearAttention", ("qkv_proj_states", "g1", "beta", "core_attn_out"), GlmLayer,
    ),
    "vllm.model_executor.models.bailing_moe_v3": (
        "BailingMoeV3KimiDeltaAttention",
        ("q_proj_states", "k_proj_states", "v_proj_states", "g1", "beta", "core_attn_out"), LingLayer,
    ),
}  # fmt: skip


def register(stock: ModuleType) -> None:
    """Register our layer for the one of a module of vLLM, unless that is not the one it was written for."""
    name, arguments, ours = LAYERS[stock.__name__]
    theirs = getattr(stock, name, None)
    found = None if theirs is None else tuple(inspect.signature(theirs._forward).parameters)[1:]
    if found != arguments:
        logger.warning(
            "kda_layers has no layer for %s.%s, whose core takes %s: its functions are replaced",
            stock.__name__, name, ", ".join(found or ("nothing",)),
        )  # fmt: skip
        return
    theirs.register_oot(make(stock, theirs, ours))
    if ours is LingLayer:
        _operator(stock)


def make(stock: ModuleType, theirs: type[Any], ours: type[Layer]) -> type[Any]:
    """Return our layer as a subclass of vLLM's, for whose name its log and `register_oot` look."""
    members: dict[str, Any] = dict(stock_module=stock, stock_layer=theirs, __module__=__name__)
    if issubclass(ours, KimiLayer):

        def _forward(self: Any, **tensors: Tensor) -> None:
            core = theirs._forward if self.core is None else ours.kda_core
            core(self, **tensors)

        members["_forward"] = stock.eager_break_during_capture(_forward)
    elif ours is GlmLayer:
        members["kda_normed"] = stock.eager_break_during_capture(ours.kda_core)
    return type(f"KDALayers{theirs.__name__}", (ours, theirs), members)


@functools.cache
def _say_once(level: int, message: str) -> None:
    logger.log(level, message)

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
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kda_layers.engines import vllm_recover
from kda_layers.engines.vllm_core import CHECKPOINTS, Core, Parameters, Tokens, refusals, warm_up

logger = logging.getLogger("vllm.kda_layers")

MOST_FACTORED = 256  # heads of all sequences up to which a decode step multiplies the gates' second factors itself
OPERATOR = "kda_layers_core"  # of torch.ops.vllm, for layers under torch.compile


class Layer:
    """The common part of our layers; a mixin before vLLM's class, whose module has the functions it calls."""

    stock_module: ModuleType
    stock_layer: type[Any]
    core: Core | None = None  # None: vLLM's own layer
    _is_left = False  # because it cannot be served

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._parameters_here: tuple[tuple[int, ...], Parameters] | None = None
        self._conv_first = self.stock_module.is_conv_state_dim_first()
        p, dtype, states = self.make_parameters(), self.model_config.dtype, self.get_state_dtype()
        found = refusals(p.conv_weight.device, dtype, states, self.head_dim, self.conv_size, p.lower_bound)
        recovers, device, tokens = vllm_recover.is_on(self.cache_config), p.conv_weight.device, self.most_tokens()
        if recovers:
            found += vllm_recover.refusals(device, dtype, self.head_dim, tokens, p.gate["gate_activation"])
        if self.o_norm.activation != "sigmoid":
            found.append(f"its output gate is {self.o_norm.activation}")
        if found and recovers and not hasattr(self, "use_recoverssm"):
            raise ValueError(
                f"vLLM's {self._theirs()} must be served without --use-replayssm: it has no RecoverSSM, and its states "
                f"would keep rejected drafts; kda_layers does not serve it: {'; '.join(found)}"
            )
        if found:
            _say_once(logging.WARNING, f"kda_layers leaves {self._theirs()} to vLLM: {'; '.join(found)}")
            self._is_left = True
            return
        stock, exporter, updates = self.stock_module, exporter_class()(state_len=self.conv_size - 1), None
        if recovers:
            self.recoverssm_records = None  # vLLM's own, which nothing reads
            updates = vllm_recover.new_updates(self.local_num_heads, self.head_dim, tokens, device)
        self.core = Core(self.local_num_heads, self.head_dim, stock.causal_conv1d_update, exporter, updates)
        _say_once(logging.INFO, f"kda_layers serves {self._theirs()} on vLLM's pools of states")

    def _theirs(self) -> str:
        return f"{self.stock_module.__name__}.{self.stock_layer.__name__}"

    def most_tokens(self) -> int:
        """Return how many tokens a request has in a step without its prompt, at most: one, and those drafted."""
        return 1 + int(self.num_spec)

    def get_attn_backend(self) -> Any:
        """Return vLLM's backend, whose metadata commits our drafts if these leave the states as they are."""
        if self.core is None or self.core.updates is None:
            return super().get_attn_backend()  # type: ignore[misc]
        return vllm_recover.backend()

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """Return vLLM's specification, with a checkpoint in each prefill at our boundaries."""
        spec: Any = super().get_kv_cache_spec(vllm_config)  # type: ignore[misc]
        if self.core is None:
            return spec
        return dataclasses.replace(spec, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=CHECKPOINTS)

    def bind_kv_cache(self, kv_cache: Any) -> None:
        """Take the pools of states; compile what steps call, before a graph captures them."""
        super().bind_kv_cache(kv_cache)  # type: ignore[misc]
        if self.core is not None:
            recovers, tokens = self.core.updates is not None, self.most_tokens()
            p, dtype = self.core_parameters(), self.model_config.dtype
            warm_up(self.local_num_heads, dtype, self._conv_first, self.kv_cache[1], p, tokens, recovers)

    def core_parameters(self) -> Parameters:
        """Return `make_parameters` this layer, made again if a weight has moved."""
        if self._parameters_here is None or self._parameters_here[0] != self._addresses():
            made = self.make_parameters()  # which may move weights
            self._parameters_here = self._addresses(), made
        return self._parameters_here[1]

    def _addresses(self) -> tuple[int, ...]:
        return tuple(t.data_ptr() for t in self._watched())

    def metadata(self) -> Any:
        """Return this step's metadata, or None in runs without states: those that measure memory."""
        metadata = self.stock_module.get_forward_context().attn_metadata
        return None if metadata is None else metadata.get(self.prefix)

    def pools(self) -> tuple[Tensor, Tensor]:
        """Return the convolution's states [slots, channels, inputs] and the recurrent ones [slots, H, D, D]."""
        conv, state = self.kv_cache[:2]
        return conv if self._conv_first else conv.transpose(-1, -2), state

    def run_core(self, x: Tokens, out: Tensor) -> None:
        """Write this step's normed outputs to out [1, T, H, D], if there is a step."""
        m = self.metadata()
        if m is None:
            return
        assert self.core is not None
        self.core.run(m, x, self.core_parameters(), *self.pools(), out)

    def few_decoded(self, tokens: int) -> Any:
        """Return the metadata of a step of a few decoded tokens alone which is not captured in pieces, or None."""
        if self.core is None or tokens * self.local_num_heads > MOST_FACTORED or torch.compiler.is_compiling():
            return None
        context, m = self.stock_module.get_forward_context(), self.metadata()
        if m is None or m.num_prefills or m.num_spec_decodes or m.num_actual_tokens != tokens:
            return None
        return None if getattr(context.cudagraph_runtime_mode, "name", "") == "PIECEWISE" else m


def exporter_class() -> Any:
    """Return the class of vLLM that stores the checkpoints of a prefill."""
    return importlib.import_module("vllm.model_executor.layers.mamba.checkpoint").MambaPrefillCheckpointExporter


def factor(layer: Any, dtype: torch.dtype, rank: int) -> Tensor | None:
    """Return the weight [out, rank] of a linear layer of vLLM if a decode kernel can read it, else None."""
    weight = getattr(layer, "weight", None)
    plain = type(layer.quant_method).__name__ in ("UnquantizedLinearMethod", "KimiK3LowLatencyLinearMethod")
    if not plain or layer.bias is not None or weight is None or weight.ndim != 2 or weight.dtype != dtype:
        return None
    return weight if weight.shape[1] == rank and weight.is_contiguous() and weight.data_ptr() % 16 == 0 else None


class KimiLayer(Layer):
    """Kimi-Linear's, AliceAI's and Kimi-K3's: one projection, one convolution."""

    full_rank: bool | None = None  # of the output gate; None: as `use_full_rank_gate` says

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Return dtypes of the two states; Kimi-Linear's own layer leaves --mamba-ssm-cache-dtype out."""
        if self._is_left:
            return super().get_state_dtype()  # type: ignore[misc]
        calculator = self.stock_module.MambaStateDtypeCalculator
        cache = self.cache_config
        dtypes: tuple[torch.dtype, ...] = calculator.kda_state_dtype(
            self.model_config.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
        )  # fmt: skip
        return dtypes

    def make_parameters(self) -> Parameters:
        """Return the parameters of the core."""
        return Parameters(
            self.conv1d.weight.flatten(1), self.A_log.view(-1), self.dt_bias.view(-1, self.head_dim),
            self.o_norm.weight, self.o_norm.eps, self.gate_lower_bound,
        )  # fmt: skip

    def _watched(self) -> tuple[Tensor, ...]:
        return self.conv1d.weight, self.A_log, self.dt_bias, self.o_norm.weight

    def forward(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        """Return the layer's output [T, hidden]; a few decoded tokens skip the products with the gates' factors."""
        tokens = hidden_states.shape[0]
        overlapped = tokens <= getattr(self, "_projection_overlap_max_tokens", 0)  # with another stream's products
        m = None if overlapped else self.few_decoded(tokens)
        weight = None if m is None else factor(self.f_b_proj, hidden_states.dtype, self.head_dim)
        if weight is None:
            return super().forward(hidden_states, positions)  # type: ignore[misc]
        assert self.core is not None
        assert m is not None
        width, heads = self.local_projection_size, self.local_num_heads
        x = self.in_proj_qkvgfab(hidden_states)[0]
        gate_weight = None
        if self._full_rank():
            qkv, gate, f, beta = x[:, : 4 * width + self.head_dim + heads].split(
                [3 * width, width, self.head_dim, heads], -1
            )
        else:
            qkv, beta, f = x.split([3 * width, heads, self.head_dim], -1)
            gate_weight = factor(self.g_b_proj, hidden_states.dtype, self.head_dim)
            gate = self.g_a_proj(hidden_states)[0]
            if gate_weight is None:
                gate = self.g_b_proj(gate)[0]
        out = torch.empty((1, x.shape[0], heads, self.head_dim), dtype=x.dtype, device=x.device)
        slots = m.non_spec_state_indices_tensor[: x.shape[0]]
        conv, state = self.pools()
        factors = weight, gate_weight
        self.core.decode(slots, Tokens(qkv, f, gate, beta), self.core_parameters(), conv, state, out, factors)
        return self._output(out.view(x.shape[0], -1))

    def _full_rank(self) -> bool:
        return bool(getattr(self, "use_full_rank_gate", self.full_rank))

    def _output(self, o: Tensor) -> Tensor:
        reduce = getattr(self, "gemm_rs_ar", None)
        if reduce is not None and reduce.should_run(o):
            return reduce.apply(o, self.o_proj)
        return self.o_proj(o)[0]

    def kda_core(self, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor) -> None:
        """Write the layer's normed outputs to core_attn_out [1, T, H, D]; the name of vLLM's method is `_forward`."""
        self.run_core(Tokens(mixed_qkv, g1[0].flatten(1), g2.flatten(1), beta[0]), core_attn_out)


class K3Layer(KimiLayer):
    """Kimi-K3's, whose output gate has full rank."""

    full_rank = True


class MergedConvolution(Layer):
    """Layers with three convolutions, whose weights are joined."""

    def make_parameters(self) -> Parameters:
        """Return the parameters of the core.

        The three weights become rows of one tensor, so that weights that are loaded into them later are read, too.
        """
        weights = [conv.weight for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)]
        taps = torch.cat([weight.detach().flatten(1) for weight in weights])
        for weight, rows in zip(weights, taps.split([len(weight) for weight in weights]), strict=True):
            weight.data = rows.view(weight.shape)
        return Parameters(
            taps, self.A_log.view(-1), self.dt_bias.view(-1, self.head_dim), self.o_norm.weight,
            self.o_norm.eps, self.bound(),
        )  # fmt: skip

    def _watched(self) -> tuple[Tensor, ...]:
        convs = self.q_conv1d, self.k_conv1d, self.v_conv1d
        return *(conv.weight for conv in convs), self.A_log, self.dt_bias, self.o_norm.weight


class GlmLayer(MergedConvolution):
    """GLM-5.3-Flash's."""

    def bound(self) -> float | None:
        """Return the lower bound of the gate."""
        found: float | None = self.kda_lower_bound
        return found

    def forward(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        """Return the layer's output [T, hidden]; vLLM's own norms outside of its core."""
        if self.core is None:
            return super().forward(hidden_states, positions)  # type: ignore[misc]
        width, heads, D = self.local_projection_size, self.local_num_heads, self.head_dim
        qkv, beta, f, gate = self.in_proj_qkvbfg_a(hidden_states)[0].split([3 * width, heads, D, D], -1)
        f, gate = self.f_b_proj(f)[0], self.g_b_proj(gate)[0]
        out = torch.empty((1, qkv.shape[0], heads, D), dtype=qkv.dtype, device=qkv.device)
        self.kda_normed(qkv, f, gate, beta, out)
        return self.o_proj(out.view(out.shape[1], -1))[0]

    def kda_core(self, qkv: Tensor, f: Tensor, gate: Tensor, beta: Tensor, out: Tensor) -> None:
        """Write the layer's normed outputs to out [1, T, H, D]."""
        self.run_core(Tokens(qkv, f, gate, beta), out)


class LingLayer(MergedConvolution):
    """Ling's, under torch.compile: the core is an operator that splits the graph."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.core is None:
            return
        splits = self.stock_module.get_current_vllm_config().compilation_config.splitting_ops
        if splits is not None and f"vllm::{OPERATOR}" not in splits:
            splits.append(f"vllm::{OPERATOR}")

    def most_tokens(self) -> int:
        """Return how many tokens a request has in a step without its prompt, at most."""
        return 1 + int(self.num_speculative_tokens)

    def bound(self) -> float | None:
        """Return the lower bound of the gate, None for softplus."""
        return self.lower_bound if self.safe_gate else None

    def forward(self, hidden_states: Tensor, positions: Tensor, output: Tensor) -> None:
        """Write the layer's output to output [T, hidden]; the gates' activations are the core's."""
        if self.core is None:
            super().forward(hidden_states, positions, output)  # type: ignore[misc]
            return
        width, heads, D = self.projection_size_per_partition, self.local_num_heads, self.head_dim
        if self.separate_b_proj:
            qkv, beta = self.qkv_proj(hidden_states)[0], self.b_proj(hidden_states)[0]
        else:
            qkv, beta = self.qkvb_proj(hidden_states)[0].split([3 * width, heads], -1)
        f, gate = self.f_proj(hidden_states)[0], self.g_proj(hidden_states)[0]
        out = torch.zeros((1, qkv.shape[0], heads, D), dtype=qkv.dtype, device=qkv.device)
        getattr(torch.ops.vllm, OPERATOR)(qkv, f, gate, beta, out, self.prefix)
        output[:] = self.o_proj(out.view(out.shape[1], -1))[0]

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
    found = () if theirs is None else tuple(inspect.signature(theirs._forward).parameters)[1:]
    if theirs is None or found != arguments:
        logger.warning(
            "kda_layers has no layer for %s.%s, whose core takes %s: its functions are replaced",
            stock.__name__, name, ", ".join(found) or "nothing",
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

"""Stand-ins for vLLM 0.33.0's KDA layers and what they import: attributes, layouts, dtypes, metadata of the wheel."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from kda_layers.engines import vllm, vllm_layer, vllm_recover
from tests.kernels.cases import BEST_DEVICE

HIDDEN, TAPS = 32, 4
KIMI, K3, GLM, LING = vllm.LAYERS
NAMES = {"kimi": KIMI, "k3": K3, "glm": GLM, "ling": LING}


@dataclass
class Metadata:
    """The fields of GDNAttentionMetadata that a core reads; those of a step of decoded tokens."""

    num_actual_tokens: int
    non_spec_state_indices_tensor: Tensor | None = None
    num_prefills: int = 0
    num_decodes: int = 0
    num_spec_decodes: int = 0
    has_initial_state: Tensor | None = None
    non_spec_query_start_loc: Tensor | None = None
    checkpoint: Any = None
    spec_state_indices_tensor: Tensor | None = None
    spec_query_start_loc: Tensor | None = None
    spec_token_indx: Tensor | None = None
    non_spec_token_indx: Tensor | None = None
    num_accepted_tokens: Tensor | None = None


@dataclass(frozen=True)
class MambaSpec:
    num_prefill_checkpoint_blocks: int = 0
    prefill_checkpoint_alignment: int | None = None


class UnquantizedLinearMethod:
    """Its name says that `weight` can be read."""


class Linear(nn.Module):
    """A projection as vLLM's: a pair is returned, rows may be longer than `sizes`."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.bias, self.quant_method = torch.randn(outputs, inputs) * inputs**-0.5, None, None
        self.weight, self.quant_method = self.weight.to(dtype), UnquantizedLinearMethod()
        self.calls = 0

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        self.calls += 1
        return nn.functional.linear(x, self.weight), None


class Norm(nn.Module):
    """FusedRMSNormGated: in place."""

    activation = "sigmoid"

    def __init__(self, size: int, dtype: torch.dtype, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = (1 + torch.randn(size) / 10).to(dtype), eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = nn.functional.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)
        return (y * gate.float().sigmoid()).to(x.dtype).view(x.shape)


@dataclass
class Config:
    """Options of a layer."""

    family: str = "kimi"
    heads: int = 2
    head_dim: int = 64
    bound: float | None = None
    dtype: torch.dtype = torch.bfloat16
    state: str = "auto"
    drafts: int = 0
    recovers: bool = False  # RecoverSSM
    more: dict[str, Any] = field(default_factory=dict)  # attributes of the layer


class StockLayer(nn.Module):
    """vLLM's layer of any family; its core fails, as ours must be called."""

    mamba_dtypes: Any
    replacement: type[nn.Module] | None = None

    @classmethod
    def register_oot(cls, layer: type[nn.Module]) -> None:
        cls.replacement = layer

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config, self.prefix = c, "model.layers.0.self_attn"
        setattr(self, "num_speculative_tokens" if c.family == "ling" else "num_spec", c.drafts)
        self.head_dim, self.local_num_heads, self.conv_size = c.head_dim, c.heads, TAPS
        P = self.local_projection_size = self.projection_size_per_partition = c.heads * c.head_dim
        self.model_config = SimpleNamespace(dtype=c.dtype)
        self.cache_config = SimpleNamespace(
            mamba_cache_dtype="auto", mamba_ssm_cache_dtype=c.state, use_kda_recoverssm=c.recovers
        )
        if c.family == "k3":
            self.use_recoverssm, self.recoverssm_records = c.recovers, "vLLM's"
        with torch.device(BEST_DEVICE):
            self.o_norm, self.o_proj = Norm(c.head_dim, c.dtype), Linear(P, HIDDEN, c.dtype)
            self.dt_bias, self.A_log = torch.randn(P) / 2, torch.randn(c.heads) / 2
            self.gate_lower_bound = self.kda_lower_bound = self.lower_bound = c.bound
            self.safe_gate = c.bound is not None
            convolutions = {"kimi": 1, "k3": 1}.get(c.family, 3)
            names = ("conv1d",) if convolutions == 1 else ("q_conv1d", "k_conv1d", "v_conv1d")
            for name in names:
                weight = torch.randn(3 * P // convolutions, 1, TAPS) / 2
                setattr(self, name, SimpleNamespace(weight=weight, bias=None))
            self.make_projections(c, P)
        if c.family in ("glm", "ling"):
            self.A_log = self.A_log.view(1, 1, -1, 1)
        vars(self).update(c.more)

    def make_projections(self, c: Config, P: int) -> None:
        D, H, dtype = c.head_dim, c.heads, c.dtype
        if c.family == "ling":
            self.separate_b_proj = False
            self.qkvb_proj = Linear(HIDDEN, 3 * P + H, dtype)
            self.f_proj, self.g_proj = Linear(HIDDEN, P, dtype), Linear(HIDDEN, P, dtype)
            return
        self.f_b_proj = Linear(D, P, dtype)
        if c.family == "glm":
            self.in_proj_qkvbfg_a, self.g_b_proj = Linear(HIDDEN, 3 * P + H + 2 * D, dtype), Linear(D, P, dtype)
        elif c.family == "k3":
            self.in_proj_qkvgfab = Linear(HIDDEN, 4 * P + D + H + 14, dtype)  # padded
        else:
            self.use_full_rank_gate = False
            self.in_proj_qkvgfab = Linear(HIDDEN, 3 * P + H + D, dtype)
            self.g_a_proj, self.g_b_proj = Linear(HIDDEN, D, dtype), Linear(D, P, dtype)

    def logits(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v; logits of decays, of the output gate and of beta, as vLLM's forwards project them."""
        P, D, H = self.local_projection_size, self.head_dim, self.local_num_heads
        if self.config.family == "ling":
            qkv, beta = self.qkvb_proj(x)[0].split([3 * P, H], -1)
            return qkv, self.f_proj(x)[0], self.g_proj(x)[0], beta
        if self.config.family == "glm":
            qkv, beta, f, gate = self.in_proj_qkvbfg_a(x)[0].split([3 * P, H, D, D], -1)
            return qkv, self.f_b_proj(f)[0], self.g_b_proj(gate)[0], beta
        if self.config.family == "k3":
            qkv, gate, f, beta, _ = self.in_proj_qkvgfab(x)[0].split([3 * P, P, D, H, 14], -1)
            return qkv, self.f_b_proj(f)[0], gate, beta
        qkv, beta, f = self.in_proj_qkvgfab(x)[0].split([3 * P, H, D], -1)
        return qkv, self.f_b_proj(f)[0], self.g_b_proj(self.g_a_proj(x)[0])[0], beta

    def forward(self, hidden_states: Tensor, positions: Tensor | None) -> Tensor:
        qkv, f, gate, beta = self.logits(hidden_states)
        H, D = self.local_num_heads, self.head_dim
        out = hidden_states.new_empty(1, hidden_states.shape[0], H, D)
        self._forward(
            mixed_qkv=qkv, g1=f.unflatten(-1, (H, D))[None], g2=gate.unflatten(-1, (H, D)), beta=beta[None],
            core_attn_out=out,
        )  # fmt: skip
        return self.o_proj(out.view(out.shape[1], -1))[0]

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return calculator().kda_state_dtype(self.model_config.dtype, "auto", self.cache_config.mamba_ssm_cache_dtype)

    def get_kv_cache_spec(self, _: Any) -> MambaSpec:
        return MambaSpec()

    def get_attn_backend(self) -> str:
        return "vLLM's"

    def bind_kv_cache(self, pages: tuple[Tensor, Tensor]) -> None:
        self.kv_cache = pages


def calculator() -> Any:
    def kda_state_dtype(dtype: torch.dtype, _: str, state: str) -> tuple[torch.dtype, torch.dtype]:
        return dtype, dict(auto=torch.float32, bfloat16=torch.bfloat16)[state]

    return SimpleNamespace(kda_state_dtype=kda_state_dtype)


class Engine:
    """A module of vLLM with a layer, and the context of a forward."""

    def __init__(self, family: str, dim_first: bool = False) -> None:
        self.family, self.breaks = family, []
        self.context = SimpleNamespace(attn_metadata=None, no_compile_layers={}, cudagraph_runtime_mode=None)
        self.module = ModuleType(NAMES[family])
        name, arguments, _ = vllm_layer.LAYERS[NAMES[family]]
        self.compilation = SimpleNamespace(splitting_ops=["vllm::bailing_v3_kda_attention"])
        scope: dict[str, Any] = {}
        exec(f"def _forward(self, {', '.join(arguments)}): raise AssertionError('of vLLM')", scope)
        layer = type(name, (StockLayer,), {"_forward": scope["_forward"]})
        vars(self.module).update({
            name: layer, "causal_conv1d_fn": causal_conv1d_fn, "causal_conv1d_update": causal_conv1d_update,
            "is_conv_state_dim_first": lambda: dim_first, "get_forward_context": lambda: self.context,
            "eager_break_during_capture": self.breaks_at, "MambaStateDtypeCalculator": calculator(),
            "get_current_vllm_config": lambda: SimpleNamespace(compilation_config=self.compilation),
            "direct_register_custom_op": self.define,
        })  # fmt: skip
        self.layer, self.dim_first = layer, dim_first

    def breaks_at(self, function: Any) -> Any:
        self.breaks.append(function)
        return function

    def define(self, op_name: str, op_func: Any, mutates_args: list[str]) -> None:
        if not hasattr(torch.ops.vllm, op_name):
            schema = torch.library.infer_schema(op_func, mutates_args=mutates_args)
            LIBRARY.define(op_name + schema)
            LIBRARY.impl(op_name, lambda *args: CURRENT[0](*args), "CompositeExplicitAutograd")
        CURRENT[0] = op_func

    def make(self, c: Config) -> Any:
        """Our layer in place of vLLM's, as its __new__ would return it, with pools of states."""
        if self.layer.replacement is None:
            vllm_layer.register(self.module)
        layer = self.layer.replacement(c)
        self.context.no_compile_layers[layer.prefix] = layer
        return layer

    def step(self, layer: Any, m: Metadata | None, x: Tensor) -> Tensor:
        """The layer's outputs for a step."""
        self.context.attn_metadata = None if m is None else {layer.prefix: m}
        with torch.inference_mode():
            if self.family != "ling":
                return layer(x, None)
            output = torch.full_like(x, torch.nan)
            layer(x, None, output)
            return output


LIBRARY = torch.library.Library("vllm", "FRAGMENT")
CURRENT: list[Any] = [None]  # torch's operators are defined once in a process


MOST_REQUESTS = 6


def modules() -> dict[str, ModuleType]:
    """Modules of vLLM that our layers import themselves."""
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=MOST_REQUESTS), use_v2_model_runner=True)
    contents: dict[str, dict[str, Any]] = {
        "vllm.model_executor.layers.mamba.checkpoint": {"MambaPrefillCheckpointExporter": Exporter},
        "vllm.config": {"get_current_vllm_config": lambda: config},
        vllm_recover.METADATA: {"KimiK3KDAMetadataBuilder": Builder, "KimiK3KDAAttentionBackend": Backend},
        vllm_recover.KERNELS: {
            "NULL_BLOCK_ID": 0, "_prepare_commit_plan_kernel": Launched(prepare_commit_plan),
            "_compact_conv_state_kernel": Launched(compact_conv_state),
        },
    }  # fmt: skip
    found = {}
    for name, members in contents.items():
        for i in range(name.count(".")):
            package = name.rsplit(".", i + 1)[0]
            found.setdefault(package, sys.modules.get(package) or ModuleType(package))
            vars(found[package]).setdefault("__path__", [])
        found[name] = ModuleType(name)
        vars(found[name]).update(members)
    return found


class Backend:
    """KimiK3KDAAttentionBackend."""


class Builder:
    """KimiK3KDAMetadataBuilder; ours replaces how it makes the object that commits."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        self.recoverssm_context, self.layer_names = None, list(layers)
        self.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))


# ---------------------------------------------------------------- vLLM's kernels


def silu_conv(x: Tensor, history: Tensor, weight: Tensor) -> Tensor:
    """x [D, T] and history [D, W - 1] to [D, T], computed in fp32."""
    windows = torch.cat((history, x), 1).float().unfold(1, weight.shape[1], 1)
    return nn.functional.silu((windows * weight.float()[:, None]).sum(-1)).to(x.dtype)


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: None, *, activation: str, conv_states: Tensor, has_initial_state: Tensor,
    cache_indices: Tensor, query_start_loc: Tensor, metadata: Any,
) -> Tensor:  # fmt: skip
    y, kept = torch.full_like(x, torch.nan), weight.shape[1] - 1
    for n, (start, end) in enumerate(zip(query_start_loc.tolist(), query_start_loc[1:].tolist(), strict=False)):
        slot = int(cache_indices[n])
        if slot == 0:
            continue
        state = conv_states[slot, :, :kept]
        history = state if has_initial_state[n] else torch.zeros_like(state)
        y[:, start:end] = silu_conv(x[:, start:end], history, weight)
        state.copy_(torch.cat((history, x[:, start:end]), 1)[:, -kept:].clone())
    return y


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: None, *, activation: str, conv_state_indices: Tensor,
    validate_data: bool, out: Tensor, num_accepted_tokens: Tensor | None = None, query_start_loc: Tensor | None = None,
    max_query_len: int = 1,
) -> Tensor:  # fmt: skip
    """With drafts, a state has all inputs after the first accepted token, which is where the next one's begins."""
    kept = weight.shape[1] - 1
    offsets = range(x.shape[0] + 1) if query_start_loc is None else query_start_loc.tolist()
    for n, slot in enumerate(conv_state_indices.tolist()):
        tokens = x[offsets[n] : offsets[n + 1]].mT
        first = 0 if num_accepted_tokens is None else int(num_accepted_tokens[n]) - 1
        history = conv_state[slot, :, first : first + kept].clone()
        if slot == 0:
            continue
        out[offsets[n] : offsets[n + 1]] = silu_conv(tokens, history, weight).mT
        new = torch.cat((history[:, 1:], tokens), 1)
        conv_state[slot, :, : new.shape[1]] = new
    return out


class Exporter:
    """MambaPrefillCheckpointExporter: inputs before a checkpoint, and its state, to a slot."""

    def __init__(self, state_len: int) -> None:
        self.state_len = state_len

    def export(
        self, checkpoint: Any, *, raw_qkv: Tensor, conv_state: Tensor, recurrent_checkpoint: Tensor,
        recurrent_state: Tensor, cu_seqlens: Tensor,
    ) -> None:  # fmt: skip
        for n, (offset, slot) in enumerate(
            zip(checkpoint.checkpoint_offsets.tolist(), checkpoint.state_indices.tolist(), strict=True)
        ):
            if offset > 0 and slot != 0:
                end = int(cu_seqlens[n]) + offset
                conv_state[slot, :, : self.state_len] = raw_qkv[end - self.state_len : end].mT
                recurrent_state[slot] = recurrent_checkpoint[n].to(recurrent_state.dtype)


class Launched:
    """A Triton kernel, which is launched by kernel[grid](...)."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda **arguments: self.function(grid, SimpleNamespace(**arguments))


def prepare_commit_plan(grid: tuple[int], a: Any) -> None:
    """Write how much each request commits, and the slots of the blocks of tokens where its states go."""
    offsets = a.query_start_loc_ptr.tolist()
    for n in range(grid[0]):
        request = n if a.request_indices_ptr is None else int(a.request_indices_ptr[n])
        source = final = int(a.state_indices_ptr[n])
        accepted = min(max(int(a.num_accepted_ptr[request]), 0), offsets[n + 1] - offsets[n], a.SPEC_QUERY_LEN)
        boundary, until = 0, 0
        if a.block_table_ptr is not None:
            blocks, before = a.block_table_ptr[request].tolist(), int(a.num_computed_ptr[request])
            after, end = before + accepted, (before // a.mamba_block_size + 1) * a.mamba_block_size
            final = blocks[min(max(after - 1, 0) // a.mamba_block_size, a.block_table_width - 1)]
            until = end - before
            boundary = blocks[end // a.mamba_block_size - 1] if after >= end else 0
        plan = (accepted, final, boundary, until) if source > 0 and accepted else (0, 0, 0, 0)
        a.commit_lens_ptr[n], a.final_state_indices_ptr[n], a.boundary_state_indices_ptr[n] = plan[:3]
        a.boundary_recovery_lens_ptr[n] = plan[3]


def compact_conv_state(grid: tuple[int, int, int], a: Any) -> None:
    """Inputs before the next token, and those before a boundary, to the front of their slots."""
    kept = a.conv_history_len
    for i in range(grid[2]):
        strides = (a.conv_state_block_strides_ptr, a.conv_state_dim_strides_ptr, a.conv_state_token_strides_ptr)
        conv, at = a.conv_state_ref_ptr, int(a.conv_state_base_addrs_ptr[i])
        assert at == conv.data_ptr(), "the first layer's"
        assert tuple(int(s[i]) for s in strides) == conv.stride()
        for n in range(grid[1]):
            source, final, taken = (
                int(t[n]) for t in (a.state_indices_ptr, a.final_state_indices_ptr, a.commit_lens_ptr)
            )
            if source <= 0 or not taken or final <= 0:
                continue
            boundary, until = int(a.boundary_state_indices_ptr[n]), int(a.boundary_recovery_lens_ptr[n])
            inputs = conv[source].clone()
            if a.ALIGN_MODE and boundary > 0:
                conv[boundary, :, :kept] = inputs[:, until - 1 : until - 1 + kept]
            conv[final, :, :kept] = inputs[:, taken - 1 : taken - 1 + kept]

"""The parameters of the kernels of the forward, whatever its form."""

from __future__ import annotations

import torch
from torch import Tensor

from ....cuda.params import Params
from ...activations import BETA_CODES
from ...contract import Inputs, KDAOutput
from ..spec import MOST_TOKENS, LastTokens, Saved, Signature

PARAMS = Params("ForwardParams", """
    const u16 *q, *k;              // [B, T, H, K]
    const u16* v;                  // [B, T, HV, V]
    const void* g;                 // [B, T, HV, K]
    const void* beta;              // [B, T, HV]
    const float *A_log, *dt_bias;  // [HV], [HV, K], or null
    const float* initial_state;    // [N, HV, V, K], or null; not read if POOLED
    const void* cu_seqlens;        // [N + 1], or null
    u16* o;                        // [B, T, HV, V]
    float* final_state;            // [N, HV, V, K], or null; if POOLED [slots, HV, V, K] or null, read and overwritten
    float* checkpoints;            // [B, T / 64, HV, V, K], or null; if POOLED [N, HV, V, K] zeros
    // Null without shared chunks; of two_roles.cu see roles.cuh
    unsigned char* ring;           // RING * STAGE_BYTES per CTA group
    u32* progress;                 // [CTA groups][2][32] zeros
    // Saved if SAVES; NC chunks of all sequences
    unsigned char* prepared;     // [NC, HV, STAGE_BYTES], replaces the ring
    u16* states;                 // [NC, HV, V, K], at each chunk's start
    u16* errors;                 // [B, T, HV, V], V'
    unsigned char* fine;         // [NC, HV, SQUARE] if FINE: T' in fp16, see stage.cuh
    const void *slots, *stops;   // read if POOLED: [N], or null: sequence n has slot n; no checkpoint
    // Of segments.cu, of the tiles of sequences that are cut: [rows, V + K, K], B and F; [rows, V, K], their S0
    float *maps, *starts;
    // Read if TAILS, of calls whose last tokens the decode kernel computes (last_tokens.py)
    const int* order;  // what order.cu writes, or null: all sequences as they come
    float* handover;   // [sequences in that order, HV, V, K], states before last tokens, or null
    int T, H, HV, group, tiles;  // group = HV / H, tiles = N * HV; B * T < 2^31
    int int64_offsets;           // cu_seqlens is int64
    int beta_activation, beta_fp32, qk_l2norm;
    float lower_bound, scale;
    // Read if POOLED
    int key_row, value_row, beta_row;  // strides of tokens: of q and k, v, beta
    int int64_slots, int64_stops, slot_count;
    u64 slot_stride;
    // Read by segments.cu
    int segments, cut_from;  // of a sequence at most, tiles = N * segments * HV; tokens from which a sequence is cut
    int tails;  // the decode kernel computes last tokens
    // Read by two_roles.cu
    int groups, places;  // CTA groups that scan, and places in the ring of each
""")  # fmt: skip


def pointers_of(
    x: Inputs, out: KDAOutput, last: LastTokens, saved: Saved | None = None, ring: Tensor | None = None,
    progress: Tensor | None = None, prepared: Tensor | None = None, maps: Tensor | None = None,
    starts: Tensor | None = None,
) -> bytes:  # fmt: skip
    """Pack the pointers of a call; `saved` has its own prepared chunks, the others are scratch memory of some forms."""
    states = errors = fine = None
    if saved is not None:
        prepared, states, errors, fine = saved
    return PARAMS.point(
        q=x.q, k=x.k, v=x.v, g=x.g, beta=x.beta, A_log=x.A_log, dt_bias=x.dt_bias, initial_state=x.initial_state,
        cu_seqlens=x.cu_seqlens, o=out.o, final_state=out.final_state, checkpoints=out.checkpoints, ring=ring,
        progress=progress, prepared=prepared, states=states, errors=errors, fine=fine, maps=maps, starts=starts,
        order=last.order, handover=last.before,
    )  # fmt: skip


def values_of(
    s: Signature, tiles: int, segments: int = 0, cut_from: int = 0, groups: int = 0, places: int = 0
) -> bytes:  # fmt: skip
    """Pack the values of a call; the last four are those of some forms.

    Raises:
        ValueError: there are more than `MOST_TOKENS` tokens
    """
    (B, T, H, _), HV = s.q_shape, s.v_shape[2]
    if B * T > MOST_TOKENS:
        raise ValueError(f"B * T must be at most {MOST_TOKENS}, got {B * T}: split the batch")
    return PARAMS.set(
        T=T, H=H, HV=HV, group=HV // H, tiles=tiles,
        int64_offsets=s.offsets is not None and s.offsets[1] == torch.int64,
        beta_activation=BETA_CODES[s.beta_activation], beta_fp32=s.beta_dtype == torch.float32,
        qk_l2norm=s.qk_l2norm, lower_bound=s.lower_bound, scale=s.scale, tails=s.tails,
        segments=segments, cut_from=cut_from, groups=groups, places=places,
        **({} if s.rows is None else s.rows._asdict()),
    )  # fmt: skip

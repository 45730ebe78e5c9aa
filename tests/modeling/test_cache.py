"""The cache layers: which ones a cache gets, taking tokens back, counting, reordering, size."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import LinearAttentionLayer

from kda_layers import KDAConfig, KDAForCausalLM, KimiDeltaAttention, use_backend
from kda_layers.kernels.kda import drafts
from kda_layers.kernels.kda.backends.eager import EagerBackend
from kda_layers.modeling.layer.cache import (
    KDACacheLayer,
    KDAOnlyCacheLayer,
    cache_bytes,
    with_kda_layers,
)
from kda_layers.modeling.layer.states import LayerState
from kda_layers.modeling.seams import CACHE
from tests.kernels.cases import FP64
from tests.modeling import models
from tests.modeling.common import same

D, W, HEADS, V_HEADS, K, V = 16, 4, 1, 2, 6, 8
CHANNELS = 2 * HEADS * K + V_HEADS * V
COUNTS_ON_DEVICE = functools.partial(KDAOnlyCacheLayer, on_device=True)
every_kind = pytest.mark.parametrize("kind", [KDACacheLayer, KDAOnlyCacheLayer, COUNTS_ON_DEVICE])
LENGTHS = (3, 1, 5, 2)  # of several recorded calls
T = sum(LENGTHS)


@pytest.fixture(scope="module")
def layer() -> KimiDeltaAttention:
    torch.manual_seed(0)
    return KimiDeltaAttention(
        D, HEADS, K, num_value_heads=V_HEADS, value_head_dim=V, conv_kernel_dim=W, layer_idx=0
    ).double()


def tokens(length: int, batch: int = 2, seed: int = 1) -> Tensor:
    return torch.randn(batch, length, D, generator=torch.Generator().manual_seed(seed), dtype=FP64)


def config(**fields: Any) -> KDAConfig:
    small = dict(
        vocab_size=31, hidden_size=D, intermediate_size=16, num_hidden_layers=2, linear_num_heads=HEADS,
        linear_head_dim=K, linear_num_value_heads=V_HEADS, linear_value_head_dim=V, linear_conv_kernel_dim=W,
        num_attention_heads=2, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return KDAConfig(**(small | fields))


def new_cache(kind: type[LinearAttentionLayer] = KDAOnlyCacheLayer, record: bool = True) -> DynamicCache:
    cache = DynamicCache(config=config())
    cache.layers[:] = [kind()]
    if record:
        cache.activate_past_recording()
    return cache


@torch.no_grad()
def feed(layer: KimiDeltaAttention, x: Tensor, lengths: tuple[int, ...], cache: DynamicCache) -> Tensor:
    return torch.cat([layer(part, past_key_values=cache) for part in x.split(lengths, 1)], 1)


def states(cache: DynamicCache) -> tuple[Tensor, Tensor]:
    """The last W inputs of the convolution and the recurrent state."""
    conv = cache.layers[0].conv_states[0]
    conv = torch.nn.functional.pad(conv, (max(W - conv.shape[-1], 0), 0))[..., -W:]
    return conv.clone(), cache.layers[0].recurrent_states[0].clone()


def assert_holds(layer: KimiDeltaAttention, cache: DynamicCache, x: Tensor) -> None:
    """The cache holds what a fresh one holds after x, and goes on in the same way."""
    fresh, y = new_cache(type(cache.layers[0]), record=False), tokens(3, len(x), seed=9)
    if x.shape[1]:
        feed(layer, x, (x.shape[1],), fresh)
        assert cache.layers[0].conv_states[0].shape == (len(x), CHANNELS, W)
        same(states(cache), states(fresh))
    assert cache.layers[0].has_previous_state[0] == bool(x.shape[1])
    if isinstance(cache.layers[0], KDAOnlyCacheLayer):
        assert cache.get_seq_length() == x.shape[1]
    same((feed(layer, y, (1, 2), cache),), (feed(layer, y, (3,), fresh),))
    same(states(cache), states(fresh))


# ---------------------------------------------------------------- which layers


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("interval", [0, 2])
def test_kinds(interval: int, static: bool) -> None:
    """Only a cache without softmax layers gets layers that count; other layers stay the objects they are."""
    fields = dict(config=config(num_hidden_layers=4, full_attention_interval=interval))
    cache = StaticCache(**fields, max_cache_len=8) if static else DynamicCache(**fields)
    before = list(cache.layers)
    cache.activate_past_recording()
    assert with_kda_layers(cache) is cache
    kind = KDACacheLayer if interval else KDAOnlyCacheLayer
    on_device = static and not interval
    for old, new in zip(before, cache.layers, strict=True):
        if type(old) is LinearAttentionLayer:
            assert type(new) is kind
            assert getattr(new, "on_device", False) == on_device
            assert new.record_past
            assert new.number_of_states == old.number_of_states
        else:
            assert new is old
    if on_device:
        assert cache.get_seq_length() == 0
        with pytest.raises(ValueError, match="the first layer of a static cache counts"):
            cache.get_seq_length(1)
    again = list(cache.layers)
    assert with_kda_layers(cache).layers == again, "layers were replaced twice"


def test_a_cache_that_holds_a_state_stays(layer: KimiDeltaAttention) -> None:
    cache = new_cache(LinearAttentionLayer, record=False)
    feed(layer, tokens(3), (3,), cache)
    before = cache.layers[0]
    assert with_kda_layers(cache).layers[0] is before


def test_a_stock_layer_cannot_record(layer: KimiDeltaAttention) -> None:
    with pytest.raises(ValueError, match="with_kda_layers"):
        feed(layer, tokens(3), (3,), new_cache(LinearAttentionLayer))


def test_packed_sequences_cannot_be_recorded(layer: KimiDeltaAttention) -> None:
    with pytest.raises(ValueError, match="cu_seqlens must be None"):
        layer(tokens(3, 1), past_key_values=new_cache(), cu_seqlens=torch.tensor([0, 1, 3]))


# ---------------------------------------------------------------- taking tokens back


@every_kind
@pytest.mark.parametrize("lengths", [LENGTHS, (T,), (1,) * T], ids=str)
@pytest.mark.parametrize("n", range(T + 1))
def test_crop(layer: KimiDeltaAttention, n: int, lengths: tuple[int, ...], kind: type[KDACacheLayer]) -> None:
    """After several recorded calls, for every number of tokens, the state is what the remaining tokens give."""
    x, cache = tokens(T), new_cache(kind)
    same((feed(layer, x, lengths, cache),), (layer(x),))
    assert cache.layers[0].is_croppable
    cache.layers[0].crop(-n)
    assert_holds(layer, cache, x[:, : T - n])


@every_kind
@pytest.mark.parametrize("n", range(6))
def test_crop_of_a_turn(layer: KimiDeltaAttention, n: int, kind: type[KDACacheLayer]) -> None:
    """Recording starts after a prompt; every call after a crop is recorded again, rejected tokens do not come back."""
    x, cache = tokens(T), new_cache(kind, record=False)
    feed(layer, x[:, :4], (4,), cache)
    cache.activate_past_recording()
    feed(layer, tokens(5, seed=7), (5,), cache)
    cache.layers[0].crop(torch.tensor(-5))  # all of them; a tensor, as transformers 5.17 gives
    feed(layer, x[:, 4:9], (3, 2), cache)
    removed = torch.tensor(-n)
    cache.layers[0].crop(removed)
    assert removed == -n, "crop changed its argument"
    kept = torch.cat((x[:, :4], x[:, 4 : 9 - n]), 1)
    feed(layer, x[:, 9:], (1, 1), cache)
    cache.layers[0].crop(-1)
    assert_holds(layer, cache, torch.cat((kept, x[:, 9:10]), 1))


@pytest.mark.parametrize("length", [63, 64, 127, 128, 191, 300])
def test_a_long_call_records_its_tail(layer: KimiDeltaAttention, length: int) -> None:
    """64 tokens or more can be taken back, whatever the length, and 128 or more of a long call cannot."""
    x, most = tokens(length, 1), 0
    for n in (0, 1, 17, 63, 64, 65, 107, 108, 126, 127, 128, length):
        if n > length:
            continue
        cache = new_cache()
        same((feed(layer, x, (length,), cache),), (layer(x),))
        try:
            cache.layers[0].crop(-n)
        except RuntimeError as refusal:
            assert f"got {n}" in str(refusal)  # noqa: PT017  (where the limit lies is the backend's matter)
            assert n > 64
        else:
            most = max(most, n)
            assert_holds(layer, cache, x[:, : length - n])
    assert most == length if length < 128 else 64 <= most < 128


def test_a_long_call_keeps_only_its_tail(layer: KimiDeltaAttention) -> None:
    """No tensor of all tokens survives the call."""
    length, cache = 299, new_cache()
    gc.collect()
    known = {id(o) for o in gc.get_objects()}
    feed(layer, tokens(length, 1), (length,), cache)
    gc.collect()
    new = [o for o in gc.get_objects() if id(o) not in known and isinstance(o, Tensor)]
    assert new, "nothing was recorded"
    assert not [tuple(t.shape) for t in new if length in t.shape or t.untyped_storage().nbytes() // 8 >= length * D]


@every_kind
def test_refused_crops(layer: KimiDeltaAttention, kind: type[KDACacheLayer]) -> None:
    """Without a record, beyond it, or a second time; what is refused changes nothing."""
    x, cache = tokens(T), new_cache(kind, record=False)
    feed(layer, x[:, :4], (4,), cache)
    for n in (0, -1):
        with pytest.raises(RuntimeError, match="activate_past_recording"):
            cache.layers[0].crop(n)
    cache.activate_past_recording()
    feed(layer, x[:, 4:], (3, T - 7), cache)
    with pytest.raises(RuntimeError, match=f"at most {T - 4} .*got {T - 3}"):
        cache.layers[0].crop(-(T - 3))
    same(states(cache), states_after(layer, x))
    cache.layers[0].crop(-2)
    with pytest.raises(RuntimeError, match=r"at most 0 .*got 1"):
        cache.layers[0].crop(-1)
    cache.layers[0].crop(0)
    assert_holds(layer, cache, x[:, :-2])


@every_kind
def test_an_empty_layer_has_nothing_to_take_back(layer: KimiDeltaAttention, kind: type[KDACacheLayer]) -> None:
    """As a softmax layer's: an early exit never fills the caches of later layers."""
    cache = new_cache(kind, record=False)
    cache.crop(-3)
    cache.activate_past_recording()
    cache.crop(-3)
    assert_holds(layer, cache, tokens(T)[:, :0])


@every_kind
def test_a_positive_crop_is_refused(layer: KimiDeltaAttention, kind: type[KDACacheLayer]) -> None:
    """Older caches took it as the length to keep; stock linear layers refuse it as well. Nothing changes."""
    x, cache = tokens(T), new_cache(kind)
    feed(layer, x, LENGTHS, cache)
    for n in (1, T - 1, T + 30, torch.tensor(2)):
        with pytest.raises(ValueError, match=f"minus the number of tokens to remove, got {int(n)}"):
            cache.crop(n)
    cache.crop(-2)
    assert_holds(layer, cache, x[:, :-2])


@pytest.mark.parametrize("softmax_first", [False, True], ids=["KDA first", "softmax first"])
@pytest.mark.parametrize("n", [3, 30, -9], ids=str)
def test_a_refused_crop_leaves_a_hybrid_as_it_was(n: int, softmax_first: bool) -> None:
    """No layer is cropped if another one cannot be, whatever their order: -9 is beyond what was recorded."""
    torch.manual_seed(0)
    model = KDAForCausalLM(config(full_attention_interval=2)).eval()
    cache = DynamicCache(config=model.config)
    if softmax_first:
        cache.layers.reverse()
    cache = with_kda_layers(cache)
    (kda_layer,) = [c for c in cache.layers if isinstance(c, KDACacheLayer)]
    (softmax_layer,) = [c for c in cache.layers if not isinstance(c, KDACacheLayer)]
    block = model.model.layers[0].self_attn
    keys = torch.randn(1, 2, 8, 8)
    softmax_layer.update(keys, keys)
    cache.activate_past_recording()
    alone = new_cache(KDACacheLayer)
    alone.layers[:] = [kda_layer]
    with torch.no_grad():
        block(torch.randn(1, 8, D), past_key_values=alone)
    before = states(alone)
    for copied in (False, True):  # a copy must not crop its original
        victim = copy.deepcopy(cache) if copied else cache
        with pytest.raises((ValueError, RuntimeError), match="crop"):
            victim.crop(n)
        assert victim.get_seq_length(1 - softmax_first) == 8
    same(states(alone), before)
    copy.deepcopy(cache).crop(-5)
    same(states(alone), before)
    cache.crop(-3)
    assert cache.get_seq_length(1 - softmax_first) == 5


def states_after(layer: KimiDeltaAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    cache = new_cache(record=False)
    feed(layer, x, (x.shape[1],), cache)
    return states(cache)


@pytest.mark.parametrize("n", range(4))
@pytest.mark.parametrize("length", [5, 140], ids=["short", "long"])
@pytest.mark.parametrize("where", ["left", "right", "anywhere"])
def test_crop_with_padding(layer: KimiDeltaAttention, where: str, length: int, n: int) -> None:
    """Rows padded in both turns, recorded, all but 3 tokens of one: the states are those of rows without padding."""
    cache, keep = new_cache(), []
    for T, padding in ((6, (2, 0)), (length, (0, length - 3))):
        x = tokens(T, seed=T)
        place = {"left": torch.arange(T), "right": T - 1 - torch.arange(T), "anywhere": torch.randperm(T)}[where]
        mask = place >= torch.tensor(padding)[:, None]
        with torch.no_grad():
            layer(x, mask.long(), cache)
        keep.append((x, mask))
    x, mask = keep[-1]
    keep[-1] = x[:, : length - n], mask[:, : length - n]
    cache.layers[0].crop(-n)
    for row in range(2):
        alone = torch.cat([x[row : row + 1, mask[row]] for x, mask in keep], 1)
        same([s[row : row + 1] for s in states(cache)], states_after(layer, alone))


def bytes_alive() -> int:
    """The memory of all dense tensors that are alive."""
    gc.collect()
    alive = [o for o in gc.get_objects() if type(o) is Tensor and o.layout == torch.strided]
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in alive)}.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("lengths", "most"), [((8,), 1.35), ((1,) * 8, 2.4)], ids=["target", "draft model"])
def test_bytes_of_seven_drafts(lengths: tuple[int, ...], most: float, dtype: torch.dtype) -> None:
    """The cache and all that is kept for 1 + 7 tokens to be taken back, in states; a draft model has one call each."""
    wide = KimiDeltaAttention(D, 4, 128, conv_kernel_dim=W, layer_idx=0).to(dtype)
    x, cache = tokens(12, 1).to(dtype), new_cache(record=False)
    feed(wide, x[:, :4], (4,), cache)
    cache.activate_past_recording()
    state = cache_bytes(cache)
    before = bytes_alive() - state
    feed(wide, x[:, 4:], lengths, cache)
    assert cache_bytes(cache) == bytes_alive() - before <= most * state
    cache.crop(-3)
    assert bytes_alive() - before == state, "a crop leaves nothing behind"
    fresh = new_cache(record=False)
    feed(wide, x[:, :9], (4, *(1,) * 5), fresh)
    tolerance = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=0.05, atol=0.01)
    torch.testing.assert_close(states(cache)[1], states(fresh)[1], **tolerance)


def test_a_short_call_waits(layer: KimiDeltaAttention) -> None:
    """A recorded draft changes no state until it is cropped or read, and is then the last of the record."""
    x, cache = tokens(T), new_cache()
    feed(layer, x[:, :4], (4,), cache)
    cache.crop(0)
    kda_layer = cache.layers[0]
    before = states(cache)
    feed(layer, x[:, 4:], (T - 4,), cache)
    assert kda_layer.waiting is not None
    assert torch.equal(kda_layer._recurrent_states[0], before[1])
    assert torch.equal(kda_layer._conv_states[0], before[0])
    copied = copy.deepcopy(cache)
    same(states(copied), states_after(layer, x))
    assert kda_layer.waiting is not None, "a copy took the tokens"
    copied.crop(-2)
    cache.crop(-2)
    assert kda_layer.waiting is None
    assert_holds(layer, cache, x[:, : T - 2])
    assert_holds(layer, copied, x[:, : T - 2])


@pytest.mark.parametrize("how", ["context", "option"])
def test_a_backend_that_verifies_no_drafts(
    layer: KimiDeltaAttention, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for, as flash-linear-attention's is on a GPU, it serves recorded calls by copies of the states."""
    monkeypatch.setattr(EagerBackend, "features", EagerBackend.features - {"verify"})
    drafts._verifying.cache_clear()
    x, cache = tokens(T), new_cache()
    if how == "option":
        layer = copy.deepcopy(layer)
        layer.kda_options = layer.kda_options | dict(backend="eager")
    with use_backend("eager") if how == "context" else contextlib.nullcontext():
        feed(layer, x, LENGTHS, cache)
        assert cache.layers[0].waiting is None
        cache.crop(-4)
    monkeypatch.undo()
    drafts._verifying.cache_clear()
    assert_holds(layer, cache, x[:, : T - 4])


@pytest.mark.parametrize("how", ["read", "crop", "next call"])
def test_who_verified_commits(layer: KimiDeltaAttention, how: str) -> None:
    """Whatever backend is asked for then; flash-linear-attention's has no commit."""
    x, cache = tokens(T), new_cache()
    feed(layer, x[:, :4], (4,), cache)
    feed(layer, x[:, 4:8], (4,), cache)
    with use_backend("fla"):
        if how == "read":
            assert cache.layers[0].recurrent_states[0] is not None
        elif how == "crop":
            cache.crop(-2)
        else:
            LayerState(cache, 0, x.shape[0])
    assert_holds(layer, cache, x[:, : 6 if how == "crop" else 8])


def test_tokens_wait_on_if_they_cannot_be_committed(layer: KimiDeltaAttention) -> None:
    x, cache = tokens(T), new_cache()
    feed(layer, x[:, :4], (4,), cache)
    feed(layer, x[:, 4:8], (4,), cache)
    kda_layer = cache.layers[0]
    waiting = kda_layer.waiting

    def fails(*_: Any) -> Any:
        raise RuntimeError("no memory")

    kda_layer.waiting = waiting._replace(advance=fails)
    with pytest.raises(RuntimeError, match="no memory"):
        kda_layer.recurrent_states  # noqa: B018
    kda_layer.waiting = kda_layer.waiting._replace(advance=waiting.advance)
    assert_holds(layer, cache, x[:, :8])


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_with_a_new_cache(fullgraph: bool) -> None:
    """Dynamo guards on the attributes of a layer that has not held a state."""
    torch.compiler.reset()
    model, x = models.build("kda", torch.float32).eval(), models.ids(1, 12)
    compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
    caches = [with_kda_layers(DynamicCache(config=model.config)) for _ in range(2)]
    with torch.no_grad():
        got, want = (f(x, use_cache=True, **{CACHE: c}).logits for f, c in zip((compiled, model), caches, strict=True))
    assert torch.equal(got, want)


def test_recording_with_a_gap(layer: KimiDeltaAttention) -> None:
    """Calls that were not recorded end the record, whatever came before."""
    x, cache = tokens(T), new_cache()
    feed(layer, x[:, :4], (2, 2), cache)
    for kda_layer in cache.layers:
        kda_layer.record_past = False  # as transformers does
    feed(layer, x[:, 4:6], (2,), cache)
    cache.activate_past_recording()
    feed(layer, x[:, 6:], (3, T - 9), cache)
    with pytest.raises(RuntimeError, match=f"at most {T - 6} .*got {T - 5}"):
        cache.crop(5 - T)
    cache.crop(7 - T)
    assert_holds(layer, cache, x[:, :7])


def test_the_record_of_a_chain_is_bounded(layer: KimiDeltaAttention) -> None:
    """Calls that follow each other keep one copy of the states, also when the first ones are forgotten."""
    length = 300
    x, cache = tokens(length), new_cache()
    feed(layer, x, (3,) * (length // 3), cache)
    kept = [past.before for past in cache.layers[0].past]
    assert sum(before is not None for before in kept) == 1
    assert sum(past.tokens for past in cache.layers[0].past) < 140
    cache.layers[0].crop(-100)
    assert_holds(layer, cache, x[:, :200])


def test_recording_stores_no_graph(layer: KimiDeltaAttention) -> None:
    """Recorded with gradients enabled: output and states are the same, and nothing kept requires a gradient."""
    x, cache = tokens(T), new_cache()
    o = torch.cat([layer(part, past_key_values=cache) for part in x.split(LENGTHS, 1)], 1)
    same((o,), (layer(x),))
    assert not any(s.requires_grad for s in states(cache))
    cache.layers[0].crop(-4)
    assert not any(s.requires_grad for s in states(cache))
    assert_holds(layer, cache, x[:, : T - 4])


# ---------------------------------------------------------------- reset, reorder, count, copy, size


@every_kind
@pytest.mark.parametrize("record", [False, True], ids=["plain", "recording"])
def test_reset(layer: KimiDeltaAttention, record: bool, kind: type[KDACacheLayer]) -> None:
    """A cache that was reset is a fresh one: it neither remembers tokens nor can take old ones back."""
    cache, x = new_cache(kind, record), tokens(T)
    feed(layer, tokens(T, seed=5), LENGTHS, cache)
    cache.reset()
    if record:
        with pytest.raises(RuntimeError, match="at most 0"):
            copy.deepcopy(cache).layers[0].crop(-1)
    same((feed(layer, x, LENGTHS, cache),), (layer(x),))
    if record:
        cache.layers[0].crop(-3)
    assert_holds(layer, cache, x[:, : T - 3] if record else x)


@every_kind
@pytest.mark.parametrize("record", [False, True], ids=["plain", "recording"])
def test_reorder(layer: KimiDeltaAttention, record: bool, kind: type[KDACacheLayer]) -> None:
    cache, x, order = new_cache(kind, record), tokens(T), torch.tensor([1, 1, 0])
    feed(layer, x, LENGTHS, cache)
    cache.reorder_cache(order)
    if record:
        with pytest.raises(RuntimeError, match="at most 0"):
            copy.deepcopy(cache).layers[0].crop(-1)
        cache.layers[0].crop(0)
    assert_holds(layer, cache, x[order])


@pytest.mark.parametrize("record", [False, True], ids=["plain", "recording"])
def test_counting(layer: KimiDeltaAttention, record: bool) -> None:
    cache, seen = new_cache(record=record), 0
    assert (cache.get_seq_length(), cache.get_mask_sizes(3, 0)) == (0, (3, 0))
    for part in tokens(T).split(LENGTHS, 1):
        feed(layer, part, (part.shape[1],), cache)
        seen += part.shape[1]
        assert (cache.get_seq_length(), cache.get_mask_sizes(3, 0)) == (seen, (seen + 3, 0))
    with pytest.raises(ValueError, match="no keys and values"):
        cache.update(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2), 0)


@every_kind
def test_a_deep_copy_goes_its_own_way(layer: KimiDeltaAttention, kind: type[KDACacheLayer]) -> None:
    x, cache = tokens(T), new_cache(kind)
    feed(layer, x[:, :6], (4, 2), cache)
    other = copy.deepcopy(cache)
    feed(layer, x[:, 6:], (T - 6,), cache)
    other.layers[0].crop(-3)
    assert_holds(layer, other, x[:, :3])
    cache.layers[0].crop(-(T - 5))
    assert_holds(layer, cache, x[:, :5])


# ---------------------------------------------------------------- inference mode


@pytest.mark.parametrize("kind", [LinearAttentionLayer, KDACacheLayer, KDAOnlyCacheLayer, COUNTS_ON_DEVICE])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_a_cache_filled_under_inference_mode_goes_on_outside(
    layer: KimiDeltaAttention, grad: bool, kind: type[LinearAttentionLayer]
) -> None:
    """One token and several, and back inside: as softmax caches, whose tensors are new ones at every call."""
    x, cache, lengths = tokens(T), new_cache(kind, record=False), (4, 1, 3, 1, T - 9)
    parts = x.split(lengths, 1)
    with torch.inference_mode():
        o = [layer(part, past_key_values=cache) for part in parts[:2]]
    with torch.set_grad_enabled(grad):
        o += [layer(part, past_key_values=cache) for part in parts[2:4]]
    with torch.inference_mode():
        o.append(layer(parts[4], past_key_values=cache))
        same((torch.cat(o, 1),), (layer(x),))
    same(states(cache), states_after(layer, x))


@every_kind
@pytest.mark.parametrize("n", [0, 1, 4, T])
def test_what_was_recorded_under_inference_mode_can_be_taken_back_outside(
    layer: KimiDeltaAttention, n: int, kind: type[KDACacheLayer]
) -> None:
    x, cache = tokens(T), new_cache(kind)
    with torch.inference_mode():
        feed(layer, x, LENGTHS, cache)
    cache.crop(-n)
    assert_holds(layer, cache, x[:, : T - n])


@every_kind
def test_a_cache_filled_under_inference_mode_can_be_reset_outside(
    layer: KimiDeltaAttention, kind: type[KDACacheLayer]
) -> None:
    x, cache = tokens(T), new_cache(kind, record=False)
    with torch.inference_mode():
        feed(layer, x, LENGTHS, cache)
    cache.reset()
    feed(layer, x, (T,), cache)
    assert_holds(layer, cache, x)


@every_kind
def test_offloading_changes_nothing(layer: KimiDeltaAttention, kind: type[KDACacheLayer]) -> None:
    x, cache = tokens(T), new_cache(kind, record=False)
    feed(layer, x, (T,), cache)
    for move in (cache.layers[0].offload, cache.layers[0].prefetch):
        move()
        same(states(cache), states_after(layer, x))


@pytest.mark.parametrize("interval", [0, 2])
def test_bytes_over_a_generation(interval: int) -> None:
    """KDA layers keep the same number of bytes however long the text; softmax layers add keys and values."""
    torch.manual_seed(0)
    model = KDAForCausalLM(config(full_attention_interval=interval)).eval()
    linear = model.config.layer_types.count("linear_attention")
    state = linear * 4 * (CHANNELS * W + V_HEADS * V * K)  # fp32
    per_token = 4 * 2 * D * (2 - linear)  # head_dim x heads = D, keys and values
    assert cache_bytes(DynamicCache(config=model.config)) == 0
    for new in (1, 2, 40):
        out = model.generate(
            torch.ones(3, 5, dtype=torch.long), max_new_tokens=new, do_sample=False, return_dict_in_generate=True,
            pad_token_id=0,
        )  # fmt: skip
        assert cache_bytes(out.past_key_values) == 3 * (state + per_token * (5 + new - 1))

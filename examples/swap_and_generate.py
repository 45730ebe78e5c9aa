"""Load a Kimi-Linear, swap its attention in place, generate: python swap_and_generate.py [CHECKPOINT [PROMPT]]

Without arguments it makes a tiny stock Kimi-Linear with random weights, so that it needs no network.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, KimiLinearConfig, KimiLinearForCausalLM

import kda_layers

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
if len(sys.argv) > 1:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto").to(device)
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    inputs = tokenizer(sys.argv[2] if len(sys.argv) > 2 else "The", return_tensors="pt").to(device)
else:
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2, kv_lora_rank=16)
    heads = dict(num_key_value_heads=2, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16)
    layers = dict(layer_types=["linear_attention"] * 3 + ["full_attention"], mlp_layer_types=["dense"] * 4)
    kda = dict(linear_num_heads=2, linear_head_dim=32)
    tokens = dict(vocab_size=256, pad_token_id=0, bos_token_id=None, eos_token_id=None)
    model = KimiLinearForCausalLM(KimiLinearConfig(**sizes, **heads, **layers, **kda, **tokens)).to(device)
    tokenizer, inputs = None, {"input_ids": torch.randint(256, (1, 100), device=device)}

stock = model.generate(**inputs, max_new_tokens=20, do_sample=False)
kda_layers.swap_attention(model)  # in place: the same parameters, this package's forward
swapped = model.generate(**inputs, max_new_tokens=20, do_sample=False)
print(tokenizer.decode(swapped[0]) if tokenizer else swapped[0, 100:].tolist())
print("the stock model's tokens:", "the same" if torch.equal(stock, swapped) else "different: see docs/swap.md")

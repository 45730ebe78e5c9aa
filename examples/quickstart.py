"""Kimi Delta Attention in three steps: the operator, a layer, a language model."""

import torch

from kda_layers import KDAConfig, KDAForCausalLM, KimiDeltaAttention, kda

torch.manual_seed(0)

# 1. The operator: 2 sequences of 100 tokens, 4 heads of width 32. g are gate logits, beta are logits too.
q, k, v, g = (torch.randn(2, 100, 4, 32) for _ in range(4))
beta = torch.randn(2, 100, 4)
first = kda(q, k, v, g, beta, return_final_state=True)
second = kda(q, k, v, g, beta, initial_state=first.final_state)  # the next 100 tokens
print("operator: ", tuple(second.o.shape))

# 2. The layer: [batch, tokens, hidden_size] in and out. In transformers models use swap_attention, below.
layer = KimiDeltaAttention(hidden_size=256, num_heads=4)
print("layer:    ", tuple(layer(torch.randn(2, 100, 256)).shape))

# 3. A language model, here untrained: transformers' own loss, generate, save_pretrained and Trainer work with it.
config = KDAConfig(
    vocab_size=256, hidden_size=128, num_hidden_layers=2, linear_num_heads=4, linear_head_dim=32, eos_token_id=None
)
model = KDAForCausalLM(config)
tokens = torch.randint(256, (1, 100))
print("model:     loss", round(model(tokens, labels=tokens).loss.item(), 2))
print("generated:", model.generate(tokens, max_new_tokens=10, do_sample=False)[0, 100:].tolist())

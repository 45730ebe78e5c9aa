"""`make bench-gpu`: this project's CUDA backends against flash-linear-attention, FlashQLA, cuDNN and softmax attention.

cases.py       what is timed: sizes, inputs in both gate regimes, hard inputs, byte floors
machine.py     how: a GPU's clock, memory, CUDA graphs, and a wall clock with which tests run everything on a CPU
contenders.py  who: our backends, flash-linear-attention, cuDNN, torch's softmax attention, behind one shape
truth.py       what is right: our fp32 reference for some heads of a case, itself checked against the fp64 oracle
harness.py     the rule: right first, then timed in turns (benchmarks/timing.py); who refuses is listed with the reason
operator.py    sections of the operator: forward, training, backward, decode, host, hard, ...
layer.py, kernel_shares.py   the layer, and where its GPU time goes
model.py       the language model: decoding, prefill, a training step
precompile.py  flash-linear-attention's autotuners: every configuration compiled in parallel before they time them
tables.py      Markdown
__main__.py    the command line
"""

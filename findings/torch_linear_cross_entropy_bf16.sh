#!/usr/bin/env bash
# torch's chunked linear_cross_entropy returns a loss in bf16 that is 4.0 instead of 11.8.
#
# Package:   torch 2.13.0 (CPU); 2.14.1 returns the same
# Expected:  F.linear_cross_entropy(x, weight, ids, options=LinearCrossEntropyOptions()) returns the mean or sum that
#            it returns without options, up to rounding of bf16 (0.4 %); `acc_dtype=torch.float32` makes it better.
# What is:   The loss of the chunks is added up in bf16, whatever acc_policy and acc_dtype say. The larger the
#            vocabulary, the more chunks and the lower the loss. reduction="none" and the gradients are right.
#            No warning.
# Met by:    Language models that replace their loss by this function: losses and perplexities are too low and jump,
#            early stopping and the choice of the best checkpoint follow them, while the training itself goes on.
#            Remedy: log reduction="none" and .float().mean(), or use fp32 inputs.
# Source:    torch documentation of linear_cross_entropy and LinearCrossEntropyOptions; seen with the program below.
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages venv torch==2.13.0 numpy==2.4.6

cat >"$work/run.py" <<'PY'
import torch
import torch.nn.functional as F
from torch.nn import LinearCrossEntropyOptions

print("torch", torch.__version__.partition("+")[0])
generator = torch.Generator().manual_seed(0)
x = torch.randn(2048, 64, generator=generator).bfloat16()
for entries in (1000, 8000, 32000, 128000):
    weight = (0.05 * torch.randn(entries, 64, generator=generator)).bfloat16()
    ids = torch.randint(entries, (2048,), generator=generator)
    exact = F.cross_entropy(F.linear(x.double(), weight.double()), ids)
    seen = []
    for policy, dtype in (("auto", None), ("accurate", torch.float32)):
        options = LinearCrossEntropyOptions(acc_policy=policy, acc_dtype=dtype)
        seen.append(F.linear_cross_entropy(x, weight, ids, options=options).item())
    none = F.linear_cross_entropy(x, weight, ids, options=options, reduction="none").float().mean()
    plain = F.linear_cross_entropy(x, weight, ids).item()
    print(f"{entries} entries: exact {exact:.1f}, without options {plain:.1f}, chunked {seen[0]:.1f}, "
          f"accurate and fp32 {seen[1]:.1f}, mean of reduction='none' {none:.1f}")
PY
"$work/venv/bin/python" "$work/run.py" >"$work/seen"
compare <<'END'
torch 2.13.0
1000 entries: exact 7.0, without options 7.0, chunked 7.0, accurate and fp32 7.0, mean of reduction='none' 7.0
8000 entries: exact 9.1, without options 9.0, chunked 9.4, accurate and fp32 9.4, mean of reduction='none' 9.1
32000 entries: exact 10.4, without options 10.5, chunked 8.9, accurate and fp32 8.9, mean of reduction='none' 10.4
128000 entries: exact 11.8, without options 11.9, chunked 4.0, accurate and fp32 4.0, mean of reduction='none' 11.8
END

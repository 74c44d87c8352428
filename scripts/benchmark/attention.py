# SPDX-License-Identifier: Apache-2.0
"""Benchmark our attention and dropout (counter-based random numbers) against torch, forward and backward.

    python attention.py --repeats 15
    python attention.py --kernels --device cuda

Both run alternately in one process. `--kernels` compares the kernels of a GPU with each other instead, for every head
size: milliseconds of forward and backward pass of 32 sequences of 512 tokens with 1,280 channels in bf16, as JSON. On
a CPU, the code there computes two sequences.

* hidden: [8192, 1, 1024] activations, p = 0.1, against torch.nn.functional.dropout; fp32.
* attention: packed sequences of 4,096 tokens, 12 heads of size 64, against scaled_dot_product_attention with its own
  mask and dropout, one call per sequence, as a model without packing would compute it. Sequences have one length or
  the lengths of proteins; with p = 0.1 and p = 0, bidirectional and causal.
"""

import argparse
import json
import time
from collections.abc import Callable
from itertools import accumulate, pairwise
from statistics import median

import torch
import torch.nn.functional as F
from proteins import proteins
from torch import Tensor

from bionemo.megatron.attention import PackedSequences, attend
from bionemo.megatron.cpu_attention import packed_attention
from bionemo.megatron.dropout import PROBABILITIES, AttentionDropout, dropout, layer_site

TOKENS, HEADS, HEAD_SIZE, PROBABILITY = 4096, 12, 64, 0.1


def in_turns(repeats: int, what: str, ours: Callable[[], Tensor], peer: Callable[[], Tensor]) -> None:
    """Time both alternately; print the medians, and the median and range of the ratio of each pair."""
    seconds: dict[Callable[[], Tensor], list[float]] = {ours: [], peer: []}
    for number in range(repeats + 2):
        for function, found in seconds.items():
            start = time.perf_counter()
            function().sum().backward()
            if number >= 2:  # warm-up: compiles kernels and allocates memory
                found.append(time.perf_counter() - start)
    ratios = [b / a for a, b in zip(seconds[ours], seconds[peer], strict=True)]
    print(
        f"{what:34} ours {median(seconds[ours]) * 1e3:6.1f} ms, peer {median(seconds[peer]) * 1e3:6.1f} ms: "
        f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) times as fast"
    )


def attention(repeats: int, what: str, lengths: tuple[int, ...], causal: bool = False, drops: bool = True) -> None:
    """Compare attention over one packed batch."""
    tokens = sum(lengths)
    q, k, v = (torch.randn(tokens, HEADS, HEAD_SIZE, requires_grad=True) for _ in range(3))
    drawn = AttentionDropout(torch.randint(2**62, (tokens,)), layer_site(1, PROBABILITIES), 0, HEADS, PROBABILITY)
    ours = {"dropout": drawn if drops else None, "causal": causal}
    theirs = {"dropout_p": PROBABILITY if drops else 0.0, "is_causal": causal}
    edges = list(accumulate(lengths, initial=0))

    def one_by_one() -> Tensor:
        parts = ([x[a:b].transpose(0, 1)[None] for x in (q, k, v)] for a, b in pairwise(edges))
        outputs = [F.scaled_dot_product_attention(*part, **theirs)[0].transpose(0, 1) for part in parts]
        return torch.cat(outputs)

    in_turns(repeats, what, lambda: packed_attention(q, k, v, lengths, HEAD_SIZE**-0.5, **ours), one_by_one)


def kernels(device: str, repeats: int) -> dict[str, dict[str, float]]:
    """Return milliseconds of each kernel by head size; the kernels take turns, the shortest time counts."""
    cuda, found = device == "cuda", {}
    lengths = (512,) * (32 if cuda else 2)
    tokens = sum(lengths)
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=device) * lengths[0]
    sequences = PackedSequences(lengths, starts, lengths[0])
    keys = torch.randint(2**62, (tokens,), device=device)
    for size in (16, 32, 64, 128):
        heads = 1280 // size
        q, k, v, dout = torch.randn(4, tokens, heads, size, device=device).bfloat16()
        drawn = AttentionDropout(keys, layer_site(1, PROBABILITIES), 0, heads, PROBABILITY)
        cases = {"FlashAttention": (None, False), "Triton": (None, True), "Triton, dropout": (drawn, False)}
        seconds = dict.fromkeys(cases, float("inf"))
        for number in range(repeats + 2):
            for name, (given, exact) in cases.items():
                leaves = [x.detach().requires_grad_() for x in (q, k, v)]
                torch.use_deterministic_algorithms(exact)  # then FlashAttention is not chosen
                start = time.perf_counter()
                attend(leaves[0], leaves[1], leaves[2], sequences, size**-0.5, given).backward(dout)
                if cuda:
                    torch.cuda.synchronize()
                if number >= 2:
                    seconds[name] = min(seconds[name], time.perf_counter() - start)
                torch.use_deterministic_algorithms(False)
        found[str(size)] = {name: 1e3 * each for name, each in seconds.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    repeats = options.repeats
    torch.manual_seed(0)
    if options.kernels:
        print(json.dumps(kernels(options.device, repeats)))
        return
    x, keys = torch.randn(8192, 1, 1024, requires_grad=True), torch.randint(2**62, (8192,))
    in_turns(repeats, "hidden", lambda: dropout(x, keys, 1, PROBABILITY), lambda: F.dropout(x, PROBABILITY))
    for length in (128, 256, 512, 1024):
        attention(repeats, f"attention, sequences of {length}", (length,) * (TOKENS // length))
    lengths, left = [], TOKENS
    for sequence in proteins(None, 1000):
        if len(sequence) + 2 <= min(left, 1024):
            lengths.append(len(sequence) + 2)
            left -= lengths[-1]
    attention(repeats, "attention, proteins", tuple(lengths))
    for length in (512, 2048):
        for drops in (True, False):
            what = f"causal{', dropout' * drops}, sequences of {length}"
            attention(repeats, what, (length,) * (TOKENS // length), causal=True, drops=drops)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Measure residues per second of masked marginals: ours, or a loop over transformers' EsmForMaskedLM.

The value is the number of residues that the model reads, which is the length of the protein times the number of
masked positions, per second. Every position has one variant.

python embedding.py make DIR                  create an ESM-2 with random weights in the transformers format
python variants.py bionemo DIR --length 300   and hf DIR
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from proteins import ESM2_TOKENS
from torch import Tensor

import bionemo
from bionemo.inference.variants import score_variants

LETTERS = "ACDEFGHIKLMNPQRSTVWY"


def ours(path: Path, sequence: str, variants: list[str], device: str, precision: str) -> tuple[list[float], float]:
    model = bionemo.load(path, device, precision)
    model.logits([sequence])
    begin = time.perf_counter()
    scores = score_variants(model, sequence, variants)
    return list(scores), time.perf_counter() - begin


@torch.no_grad()
def theirs(
    path: Path, sequence: str, variants: list[str], device: str, precision: str, batch: int
) -> tuple[list[float], float]:
    from transformers import EsmForMaskedLM

    token = {text: number for number, text in enumerate(ESM2_TOKENS)}
    model = EsmForMaskedLM.from_pretrained(path, attn_implementation="sdpa").to(device).eval()
    whole = torch.tensor([token["<cls>"], *map(token.__getitem__, sequence), token["<eos>"]], device=device)

    def predict(positions: Tensor) -> Tensor:
        rows = torch.arange(len(positions))
        copies = whole.repeat(len(positions), 1)
        copies[rows, positions] = token["<mask>"]
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16-mixed"):
            logits = model(copies).logits
        return logits[rows, positions].float().log_softmax(-1)

    predict(torch.tensor([1]))
    begin = time.perf_counter()
    scores: list[float] = []
    for positions in (torch.arange(len(sequence)) + 1).split(batch):
        for found, variant in zip(predict(positions), variants[len(scores) :], strict=False):
            scores.append(float(found[token[variant[-1]]] - found[token[variant[0]]]))
    return scores, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["bionemo", "hf"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--length", type=int, default=300)
    parser.add_argument("--batch", type=int, default=1, help="hf: masked copies of a batch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=["32", "bf16-mixed"], default="32")
    parser.add_argument("--save", help="a .npy file, to compare the scores")
    options = parser.parse_args()
    generator = np.random.default_rng(0)
    sequence = "".join(generator.choice(list(LETTERS), options.length))
    variants = [
        f"{letter}{number}{LETTERS[LETTERS.index(letter) - 1]}" for number, letter in enumerate(sequence, start=1)
    ]
    args = options.model, sequence, variants, options.device, options.precision
    scores, seconds = ours(*args) if options.what == "bionemo" else theirs(*args, options.batch)
    if options.save:
        np.save(options.save, scores)
    print(json.dumps({"value": options.length**2 / seconds, "unit": "residues/s"}))


if __name__ == "__main__":
    main()

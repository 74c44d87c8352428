# SPDX-License-Identifier: Apache-2.0
"""Measure embedded residues per second: ours, or transformers' models with padded batches.

python embedding.py make DIR                  create a model with random weights in the transformers format
python embedding.py bionemo DIR [--fasta F]   and hf DIR
"""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from peer import build, tokenizer
from proteins import SIZES, proteins

import bionemo

WARM_UP, LONGEST = 8, 1022


def ours(path: Path, texts: list[str], device: str, precision: str) -> tuple[NDArray[np.float32], float]:
    model = bionemo.load(path, device, precision)
    model.embed(texts[:WARM_UP])
    begin = time.perf_counter()
    found = model.embed(texts)
    return found, time.perf_counter() - begin


@torch.no_grad()
def theirs(
    path: Path, texts: list[str], device: str, precision: str, batch: int, by_length: bool
) -> tuple[NDArray[np.float32], float]:
    from transformers import AutoModelForMaskedLM

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    model = AutoModelForMaskedLM.from_pretrained(path, attn_implementation="sdpa").base_model.to(device).eval()
    words = tokenizer(model.config.model_type == "esmc")

    def embed(some: list[str]) -> NDArray[np.float32]:
        given = words(some, return_tensors="pt", padding=True).to(device)
        half = precision == "bf16-mixed"
        with torch.autocast(device, torch.bfloat16, enabled=half):
            hidden = model(**given).last_hidden_state
        inside = given.attention_mask.clone()
        inside[:, 0] = 0
        inside[torch.arange(len(some)), given.attention_mask.sum(1) - 1] = 0
        means = (hidden * inside[..., None]).sum(1) / inside.sum(1, keepdim=True)
        return np.asarray(means.float().cpu().numpy())

    embed(texts[:WARM_UP])
    begin = time.perf_counter()
    order = sorted(range(len(texts)), key=lambda i: len(texts[i])) if by_length else list(range(len(texts)))
    found = np.empty((len(texts), model.config.hidden_size), np.float32)
    for first in range(0, len(texts), batch):
        chosen = order[first : first + batch]
        found[chosen] = embed([texts[i] for i in chosen])
    return found, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "bionemo", "hf"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--size", choices=SIZES, default="8M")
    parser.add_argument("--fasta")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16, help="hf: sequences of a batch")
    parser.add_argument("--by-length", action="store_true", help="hf: sort them first")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=["32", "bf16-mixed"], default="32")
    parser.add_argument("--save", help="a .npy file, to compare the numbers")
    options = parser.parse_args()
    if options.what == "make":
        build(options.size).save_pretrained(options.model)
        return
    texts = [text[:LONGEST] for text in proteins(options.fasta, options.sequences)[: options.sequences]]
    if options.what == "bionemo":
        found, seconds = ours(options.model, texts, options.device, options.precision)
    else:
        found, seconds = theirs(
            options.model, texts, options.device, options.precision, options.batch, options.by_length
        )
    if options.save:
        np.save(options.save, found)
    print(json.dumps({"value": sum(map(len, texts)) / seconds, "unit": "residues/s"}))


if __name__ == "__main__":
    main()

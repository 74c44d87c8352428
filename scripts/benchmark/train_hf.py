# SPDX-License-Identifier: Apache-2.0
"""Measure useful tokens per second of Hugging Face's ESM models and collator in a plain loop without Trainer."""

import argparse
import json
import os
import time
from contextlib import nullcontext

import torch
from peer import build, tokenizer
from proteins import SIZES, proteins
from transformers import DataCollatorForLanguageModeling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fasta")
    parser.add_argument("--size", choices=SIZES, default="8M")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--pad", choices=["longest", "1024"], default="longest")
    parser.add_argument("--bf16", action="store_true", help="autocast to bf16")
    parser.add_argument("--steps", type=int, default=6, help="measured, after 2 that are not")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    words, model = tokenizer(options.size.startswith("ESMC")), build(options.size)
    model = model.to(options.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, fused=True)
    collate = DataCollatorForLanguageModeling(
        words, mlm_probability=0.15, pad_to_multiple_of=1024 if options.pad == "1024" else None
    )
    texts = proteins(options.fasta, 8000)
    order = torch.randperm(len(texts)).tolist()

    def step(number: int) -> int:
        chosen = [texts[i] for i in order[number * options.batch : (number + 1) * options.batch]]
        batch = collate([words(text, truncation=True, max_length=1024) for text in chosen]).to(options.device)
        with torch.autocast(options.device, torch.bfloat16) if options.bf16 else nullcontext():
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return int(batch["attention_mask"].sum())

    for warm_up in range(2):
        step(warm_up)
    if options.device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    tokens = sum(step(2 + number) for number in range(options.steps))
    if options.device == "cuda":
        torch.cuda.synchronize()
    print(json.dumps({"value": tokens / (time.perf_counter() - start), "unit": "tokens/s"}))


if __name__ == "__main__":
    main()

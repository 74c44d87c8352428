# SPDX-License-Identifier: Apache-2.0
"""Measure molecules per second and core converted to samples, against a plain pipeline of RDKit and a regex.

    python molecules.py --repeats 7

Both parse the molecule, write it in random order, tokenize it and mask spans. The plain pipeline, like BioNeMo v1,
parses it every time and also writes the canonical target. Ours is measured in the first epoch, in later epochs, and
with data of which the cache can hold only a negligible share. Measures the processor time of one thread.
"""

import argparse
import csv
import random
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
from rdkit import Chem, rdBase

from bionemo.data.molecules.augmentation import Augmentation
from bionemo.data.molecules.dataset import MoleculeDataset
from bionemo.data.molecules.smiles import SmilesRewriter
from bionemo.data.shards.formats import Csv
from bionemo.data.shards.records import TextRecords
from bionemo.data.shards.source import SequenceSource
from bionemo.tokenizers import load_tokenizer

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "molecules"
BATCH = 256
TOKENIZER = load_tokenizer("megamolbart")
PIECES = re.compile(r"\[[^\]]+\]|Br?|Cl?|%[0-9]{2}|.")
IDS = {token: i for i, token in enumerate(TOKENIZER.tokens)}


def augmentation(canonical_output: bool) -> Augmentation:
    """Return the options of MegaMolBART's pretraining, or of its variant with canonical output."""
    return Augmentation(encoder_augment=True, canonicalize_decoder_output=canonical_output, encoder_mask=True)


def ours(samples: MoleculeDataset, epoch: int) -> None:
    for at in range(0, len(samples.records), BATCH):
        records = samples.records[at : at + BATCH]
        samples.tokenize(np.full_like(records, epoch), records)


def plain(source: SequenceSource, canonical_output: bool) -> None:
    for at in range(0, len(source), BATCH):
        rows = [plain_sample(source.text(i), canonical_output) for i in range(at, min(at + BATCH, len(source)))]
        for column in zip(*rows, strict=True):
            padded = np.full((len(column), max(map(len, column))), TOKENIZER.pad_id)
            for row, ids in zip(padded, column, strict=True):
                row[: len(ids)] = ids


def plain_sample(text: str, canonical_output: bool) -> tuple[list[int], list[int], list[int]]:
    molecule = Chem.MolFromSmiles(text)
    target = Chem.MolToSmiles(molecule)
    form = Chem.MolToSmiles(molecule, doRandom=True)
    tokens = PIECES.findall(form)
    hidden, at = [], 0
    while at < len(tokens):
        if random.random() < 0.1:
            hidden.append(TOKENIZER.mask_id)
            at += int(np.random.poisson(3.0))
        else:
            hidden.append(IDS.get(tokens[at], TOKENIZER.unk_id))
            at += 1
    answers = PIECES.findall(target) if canonical_output else tokens
    ids = [IDS.get(token, TOKENIZER.unk_id) for token in answers]
    return hidden, [TOKENIZER.bos_id, *ids], [*ids, TOKENIZER.eos_id]


def rate(work: Callable[[], None], molecules: int) -> float:
    """Return molecules per second of processor time."""
    start = time.process_time()
    work()
    return molecules / (time.process_time() - start)


def summary(values: list[float]) -> str:
    """Format median and range."""
    return f"{median(values):8.4g} ({min(values):.4g} to {max(values):.4g})"


def compare(source: SequenceSource, canonical_output: bool, repeats: int) -> None:
    options = {"seed": 1, "seq_length": 512, "long_sequences": "error", "on_invalid": "error", "on_unknown": "keep"}
    samples = MoleculeDataset(
        source, TOKENIZER, augmentation(canonical_output), vary_by_epoch=True, label="benchmark", **options
    )
    rates: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):
        samples._rewriter = SmilesRewriter()
        found = {"ours, first epoch": rate(lambda: ours(samples, 0), len(source))}
        epochs = [rate(lambda epoch=epoch: ours(samples, epoch), len(source)) for epoch in (1, 2, 3)]
        found["ours, later epochs"] = median(epochs)
        samples._rewriter = SmilesRewriter(cache_bytes=0)
        found["ours, nothing remembered"] = rate(lambda: ours(samples, 0), len(source))
        found["plain"] = rate(lambda: plain(source, canonical_output), len(source))
        for name, value in found.items() if repeat else ():  # the first round is a warm-up
            rates.setdefault(name, []).append(value)
    for name, values in rates.items():
        ratios = [a / b for a, b in zip(values, rates["plain"], strict=True)]
        print(f"  {name:26} {summary(values):32}  ratio {summary(ratios)}")


def tokenise(texts: list[str], repeats: int) -> None:
    bulk = [rate(lambda: TOKENIZER.encode_all(texts), len(texts)) for _ in range(20 * repeats)]
    plainly = [
        rate(lambda: [[IDS.get(piece, 1) for piece in PIECES.findall(text)] for text in texts], len(texts))
        for _ in range(20 * repeats)
    ]
    print(f"tokenising alone, SMILES a second\n  ours  {summary(bulk)}\n  plain {summary(plainly)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=SHARED, help="directory with zinc_sample/*.csv and ESOL.csv")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    rdBase.DisableLog("rdApp.*")

    def column(path: Path, name: str) -> list[str]:
        with path.open() as file:
            return [row[name].strip() for row in csv.DictReader(file)]

    sets = {
        "ZINC15": [text for path in sorted(options.data.glob("zinc_sample/*.csv")) for text in column(path, "smiles")],
        "ESOL": column(options.data / "ESOL.csv", "SMILES"),
    }
    for name, found in sets.items():
        texts = list(dict.fromkeys(found))
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "molecules.csv"
            path.write_text("smiles\n" + "".join(f"{text}\n" for text in texts))
            source = TextRecords([path], Csv({"smiles": 0}))
            for canonical_output in (False, True):
                target = "the canonical form" if canonical_output else "the same form"
                print(f"{len(texts)} molecules of {name}, the decoder writes {target}; molecules a second")
                compare(source, canonical_output, options.repeats)
    tokenise(sets["ZINC15"], options.repeats)


if __name__ == "__main__":
    main()

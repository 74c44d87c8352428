# SPDX-License-Identifier: Apache-2.0
"""Files in the format of ProteinGym."""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
KINDS = "Activity", "Binding", "Expression", "OrganismalFitness", "Stability"
COLUMNS = "DMS_id", "DMS_filename", "UniProt_ID", "taxon", "target_seq", "coarse_selection_type", "MSA_Neff_L_category"
LONG = 200  # residues; the model has 96 tokens


def write_csv(path: Path, rows: Sequence[Sequence[object]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def write_suite(path: Path, number: int) -> None:
    """Write assays with random measurements; the last two have proteins that are longer than the model."""
    random, rows = np.random.default_rng(3), []
    for index in range(number):
        length = LONG if index >= number - 2 else int(random.integers(20, 90))
        sequence = "".join(random.choice(list(AMINO_ACIDS), length))
        name = f"P{index // 2}_{index}"
        rows.append((name, f"{name}.csv", f"P{index // 2}", "Human" if index % 3 else "Virus", sequence,
                     KINDS[index % 5], ("low", "Medium", "high")[index % 3]))  # fmt: skip
        variants: list[tuple[str, str, str, str]] = []
        for number_of in (1, 1, 2, 3) * 6:
            places = sorted(random.choice(12, number_of, replace=False))
            letters, parts = list(sequence), []
            for place in places:
                letters[place] = str(random.choice([each for each in AMINO_ACIDS if each != sequence[place]]))
                parts.append(f"{sequence[place]}{place + 1}{letters[place]}")
            if (name := ":".join(parts)) not in {row[0] for row in variants}:
                measured = random.normal()
                variants.append((name, "".join(letters), f"{measured:.3f}", str(int(measured > 0))))
        variants.append((f"{sequence[14]}15W", sequence[:14] + "W" + sequence[15:], "", ""))  # not measured
        write_csv(path / rows[-1][1], [("mutant", "mutated_sequence", "DMS_score", "DMS_score_bin"), *variants])
    write_csv(path / "DMS_substitutions.csv", [COLUMNS, *rows])

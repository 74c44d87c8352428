# SPDX-License-Identifier: Apache-2.0
"""Benchmark reading of structures against Biotite: atoms and, for mmCIF, the sequence table, without finding residues.

    python structures.py FILE...

Both run alternately in one process; the unit is milliseconds of CPU time.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from biotite.structure.io import pdb, pdbx

from bionemo.evaluation.structures import read_chain


def peer(path: Path) -> None:
    if path.suffix != ".cif":
        pdb.PDBFile.read(path).get_structure(model=1)
        return
    file = pdbx.CIFFile.read(path)
    pdbx.get_structure(file, model=1, extra_fields=["auth_asym_id", "label_entity_id"], use_author_fields=False)
    table = file.block.get("entity_poly_seq") or {}
    for column in table.values():
        column.as_array(str)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    functions: list[Callable[[Path], object]] = [read_chain, peer]
    for path in options.files:
        times: list[list[float]] = [[], []]
        for number in range(options.repeats + 1):
            for function, found in zip(functions, times, strict=True):
                start = time.process_time()
                function(path)
                if number:  # warm-up: dictionaries of components
                    found.append(1000 * (time.process_time() - start))
        ratios = sorted(b / a for a, b in zip(*times, strict=True))
        ours, theirs = map(median, times)
        print(
            f"| {path.name} | {ours:.1f} | {theirs:.1f} | {median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f}) |"
        )


if __name__ == "__main__":
    main()

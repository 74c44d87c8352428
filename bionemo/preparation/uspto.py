# SPDX-License-Identifier: Apache-2.0
"""Prepare USPTO-50k, reactions for retrosynthesis, as `{train,val,test}/data.csv`."""

import io
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from bionemo.common.errors import UserError
from bionemo.common.progress import progress
from bionemo.config.schema.preparation import UsptoJob
from bionemo.data.files import SPLITS
from bionemo.data.table import parse_table
from bionemo.preparation.inputs import notify_dropped_columns, read_input
from bionemo.preparation.molecules import unmapped_smiles
from bionemo.preparation.pool import map_ordered
from bionemo.preparation.staged_output import StagedOutput, result_parameters, stage_output
from bionemo.preparation.urls import absolute_source, find_source, is_url, redact_url

_HEADER = ("reaction_type", "set", "reactants", "products")
_SPLIT_OF_SET = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
_REACTION = "reactants>reagents>production"  # column of the public raw_train.csv, raw_val.csv and raw_test.csv
_FILE_SUFFIXES = (".csv", ".tsv", ".txt", ".gz", ".pickle", ".pkl")
_TASK_SIZE = 1000  # reactions per task of a worker


class Reaction(NamedTuple):
    """A reaction; `location` is `file:line` of its last line."""

    location: str
    type: str
    split: str
    reactants: str
    reagents: str
    products: str


def prepare(job: UsptoJob) -> None:
    """Write the reactions of each split in their order, with the columns `reaction_type,set,reactants,products`.

    Both sides are written as canonical SMILES without atom map numbers. The source is a directory or base URL with
    `raw_train.csv`, `raw_val.csv` and `raw_test.csv` (columns `class`, `reactants>reagents>production`), or one CSV
    or TSV file with `set`, `reactants` and `products`, or `reactants_mol` and `products_mol`, and `reaction_type`.

    Raises:
        UserError: if the source cannot be read or downloaded, or a molecule is invalid and its policy is `error`.
    """
    source = redact_url(job.source)
    is_file = source.lower().endswith(_FILE_SUFFIXES) if is_url(source) else not Path(source).is_dir()
    files: dict[str | None, str] = (
        {None: job.source} if is_file else {split: find_source(job.source, f"raw_{split}.csv") for split in SPLITS}
    )
    sources = [absolute_source(file) for file in files.values()]
    with stage_output(
        job.output, "uspto", result_parameters(job, "checksum"), SPLITS, sources=sources, force=job.force
    ) as output:
        if output is None:
            return
        if job.checksum and not is_file:
            raise UserError(f"checksum={job.checksum} applies to a single file, but {source} has three: remove it")
        reactions = []
        for set_of_all, file in files.items():
            reactions += _canonicalise_file(job, output, file, set_of_all)
        for split in SPLITS:
            rows = ((each.type, split, each.reactants, each.products) for each in reactions if each.split == split)
            output.write_csv(f"{split}/data.csv", _HEADER, rows)


def _canonicalise_file(job: UsptoJob, output: StagedOutput, source: str, split: str | None) -> list[Reaction]:
    """Read and canonicalise the reactions of a file, and add its record counts to the manifest.

    `split` is the split of all reactions; None: the file has a column `set`.
    """
    path, content = read_input(source, Path(job.output) / "raw", output, job.checksum)
    display_path = redact_url(source)
    counts = output.add_counts(display_path, *((split,) if split else SPLITS))
    reactions = list(_read_reactions(content, display_path, split))
    tasks = (reactions[start : start + _TASK_SIZE] for start in range(0, len(reactions), _TASK_SIZE))
    kept: list[Reaction] = []
    with (
        progress(f"reading {path.name}", len(content)) as advance,
        closing(map_ordered(_canonicalise, tasks, job)) as results,
    ):
        for reaction, (reactants, products) in zip(reactions, chain.from_iterable(results), strict=True):
            if reactants is not None and products is not None:
                kept.append(reaction._replace(reactants=reactants, products=products))
            elif job.on_invalid == "skip":
                counts.drop("invalid SMILES")
            else:
                wrong = reaction.reactants if reactants is None else reaction.products
                raise UserError(
                    f"{reaction.location}: RDKit cannot read the SMILES {wrong!r}: correct it, or set on_invalid=skip"
                )
            advance(len(content) // len(reactions))
    counts.read, counts.written = len(reactions), len(kept)
    if with_reagents := sum(reaction.reagents != "" for reaction in kept):
        counts.changed["without their reagents"] = with_reagents
    return kept


def _canonicalise(reactions: Sequence[Reaction]) -> list[tuple[str | None, str | None]]:
    """Canonicalise reactants and products; None for a SMILES that RDKit cannot parse."""
    return [(unmapped_smiles(each.reactants), unmapped_smiles(each.products)) for each in reactions]


def _read_reactions(content: bytes, display_path: str, split: str | None) -> Iterator[Reaction]:
    """Parse the rows of a file; see `_canonicalise_file` for `split`."""
    if content.startswith(b"\x80"):
        raise UserError(
            f"{display_path} is a pickle, and reading one executes the code in it: if you trust it, write a CSV file "
            "with pandas.read_pickle(...), rdkit.Chem.MolToSmiles on its columns reactants_mol and products_mol and "
            ".to_csv(..., index=False), and set source to that"
        )
    separator = "\t" if b"\t" in content.partition(b"\n")[0] else ","
    table = parse_table(io.BytesIO(content), display_path, separator)
    columns = [name.strip() for name in table.columns]
    has_reaction = _REACTION in columns
    sides = ("reactants_mol", "products_mol") if "reactants_mol" in columns else ("reactants", "products")
    required = [*([_REACTION] if has_reaction else sides), *([] if split else ["set"])]
    if missing := [name for name in required if name not in columns]:
        raise UserError(
            f"{display_path}:1: no column {' or '.join(missing)}, only {', '.join(columns)}: rename the columns"
        )
    kept = [name for name in columns if name in (*required, "set", "reaction_type", "class")]
    notify_dropped_columns(display_path, columns, kept)
    if not table.rows:
        raise UserError(f"{display_path} contains no reactions: download it again")
    for location, cells in zip(table.locations, table.rows, strict=True):
        row = dict(zip(columns, cells, strict=True))
        if has_reaction:
            reaction = row[_REACTION].strip().partition(" ")[0].split(">")
            if len(reaction) != 3:
                raise UserError(
                    f"{location}: {row[_REACTION][:60]!r} is not a reaction: write reactants>reagents>products"
                )
        else:
            reaction = [row[sides[0]], "", row[sides[1]]]
        row_split = split or _SPLIT_OF_SET.get(row["set"].strip().lower())
        if row_split is None:
            raise UserError(f"{location}: set {row['set']!r} is not known: write train, val or test")
        reaction_type = (row.get("reaction_type") or row.get("class") or "").strip()
        if reaction_type.isdigit():  # the format of the other public release and of BioNeMo v1
            reaction_type = f"<RX_{reaction_type}>"
        yield Reaction(location, reaction_type, row_split, *reaction)

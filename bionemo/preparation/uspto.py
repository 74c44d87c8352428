# SPDX-License-Identifier: Apache-2.0
"""USPTO-50k, reactions for retrosynthesis, to `{train,val,test}/data.csv`."""

import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from bionemo.common.errors import UserError
from bionemo.config.schema.preparation import UsptoJob
from bionemo.preparation.addresses import described, expected, is_url, public
from bionemo.preparation.download import fetch, locate
from bionemo.preparation.inputs import note_dropped_columns, read_small
from bionemo.preparation.molecules import unmapped_smiles
from bionemo.preparation.pool import in_order
from bionemo.preparation.progress import progress
from bionemo.preparation.writer import Draft, draft

SPLITS = ("train", "val", "test")
_HEADER = ("reaction_type", "set", "reactants", "products")
_NOT_PARAMETERS = ("_target_", "output", "force", "num_preprocess_workers", "source", "checksum")
_SETS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
_REACTION = "reactants>reagents>production"  # the column of the public raw_train.csv, raw_val.csv, raw_test.csv
_FILES = (".csv", ".tsv", ".txt", ".gz", ".pickle", ".pkl")
_TASK = 1000  # reactions that a worker is given at a time


class Reaction(NamedTuple):
    """A row, and the line where it ends."""

    line: int
    type: str
    split: str
    reactants: str
    products: str
    reagents: str = ""


def prepare(job: UsptoJob) -> None:
    """Write the reactions of each set, in their order, with the columns `reaction_type,set,reactants,products`.

    Both sides lose their atom map numbers and are written as RDKit does. The source is a directory or base URL with
    `raw_train.csv`, `raw_val.csv` and `raw_test.csv` (columns `class`, `reactants>reagents>production`), or one CSV or
    TSV file with `set`, `reactants` and `products`, or `reactants_mol` and `products_mol`, and `reaction_type`.

    Raises:
        UserError: for a source that cannot be had or read, and for a molecule that RDKit cannot read where that is an
            error.
    """
    raw, source = Path(job.output) / "raw", public(job.source)
    single = source.lower().endswith(_FILES) if is_url(source) else not Path(source).is_dir()
    files = [described(job.source)] if single else [expected(job.source, f"raw_{split}.csv") for split in SPLITS]
    parameters = {key: value for key, value in asdict(job).items() if key not in _NOT_PARAMETERS}
    with draft(job.output, "uspto", parameters, SPLITS, sources=files, force=job.force) as made:
        if made is None:
            return
        rows: dict[str, list[Reaction]] = {split: [] for split in SPLITS}
        if single:
            if source.lower().endswith((".pickle", ".pkl")):
                raise _pickle(source)
            path = fetch(job.source, raw, job.checksum)
            for reaction in _work(job, made, path, source, None):
                rows[reaction.split].append(reaction)
        else:
            if job.checksum:
                raise UserError(f"checksum={job.checksum} is of one file, but {source} holds three: leave it out")
            for split in SPLITS:
                name = f"raw_{split}.csv"
                path = locate(job.source, name, raw)
                shown = f"{source.rstrip('/')}/{name}" if is_url(source) else str(path)
                rows[split] = _work(job, made, path, shown, split)
        for split, reactions in rows.items():
            fields = ((each.type, split, each.reactants, each.products) for each in reactions)
            made.write_csv(f"{split}/data.csv", _HEADER, fields)


def _work(job: UsptoJob, made: Draft, path: Path, shown: str, split: str | None) -> list[Reaction]:
    """Read a file, of one set or all of them, canonicalise its reactions, and enter them into the books."""
    content = read_small(path, made, shown if is_url(shown) else None)
    tally = made.tally(shown, *((split,) if split else SPLITS))
    reactions = list(_reactions(content, shown, split))
    tasks = [reactions[start : start + _TASK] for start in range(0, len(reactions), _TASK)]
    kept: list[Reaction] = []
    with (
        progress(f"reading {path.name}", len(content)) as advance,
        closing(in_order(_canonical, tasks, job.num_preprocess_workers)) as results,
    ):
        for task, result in zip(tasks, results, strict=True):
            for before, after in zip(task, result, strict=True):
                tally.read += 1
                if isinstance(after, Reaction):
                    kept.append(after)
                    if after.reagents:
                        tally.changed["without their reagents"] = tally.changed.get("without their reagents", 0) + 1
                elif job.on_invalid == "skip":
                    tally.dropped["invalid SMILES"] = tally.dropped.get("invalid SMILES", 0) + 1
                else:
                    raise UserError(
                        f"{shown}:{before.line}: RDKit cannot read the SMILES {after!r}: correct it, or set "
                        "on_invalid=skip"
                    )
            advance(len(content) * len(task) // len(reactions))
    tally.written = len(kept)
    return kept


def _canonical(reactions: Sequence[Reaction]) -> list[Reaction | str]:
    """Write both sides as RDKit does; for a reaction with a side that it cannot read, give that."""
    results: list[Reaction | str] = []
    for reaction in reactions:
        reactants, products = unmapped_smiles(reaction.reactants), unmapped_smiles(reaction.products)
        if reactants is None or products is None:
            results.append(reaction.reactants if reactants is None else reaction.products)
        else:
            results.append(reaction._replace(reactants=reactants, products=products))
    return results


def _reactions(content: bytes, shown: str, split: str | None) -> Iterator[Reaction]:
    """Read the rows of a file.

    Raises:
        UserError: a file or row that is not as it should be.
    """
    if content.startswith(b"\x80"):
        raise _pickle(shown)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{shown} is not UTF-8 ({error.reason}): give a CSV or TSV file") from error
    separator = "\t" if "\t" in text.partition("\n")[0] else ","
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    columns = [name.strip() for name in reader.fieldnames or ()]
    reader.fieldnames = columns
    whole = _REACTION in columns
    sides = ("reactants_mol", "products_mol") if "reactants_mol" in columns else ("reactants", "products")
    wanted = [*([_REACTION] if whole else sides), *([] if split else ["set"])]
    if missing := [name for name in wanted if name not in columns]:
        raise UserError(f"{shown}:1: no column {' or '.join(missing)}, only {', '.join(columns)}: name the columns so")
    note_dropped_columns(
        shown, columns, [name for name in columns if name in (*wanted, "set", "reaction_type", "class")]
    )
    try:
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise UserError(f"{shown}:{reader.line_num}: {error}: correct the line") from error
    if not rows:
        raise UserError(f"{shown} holds no reactions: download it again")
    for line, row in rows:
        place = f"{shown}:{line}"
        if None in row or None in row.values():
            raise UserError(f"{place}: another number of fields than in the header: correct the line")
        reactants, reagents, products = _sides(row[_REACTION], place) if whole else (row[sides[0]], "", row[sides[1]])
        named = split or _SETS.get(row["set"].strip().lower())
        if named is None:
            raise UserError(f"{place}: set {row['set']!r} is not known: write train, val or test")
        kind = (row.get("reaction_type") or row.get("class") or "").strip()
        kind = f"<RX_{kind}>" if kind.isdigit() else kind  # as the other public release, and v1, call it
        yield Reaction(line, kind, named, reactants, products, reagents)


def _sides(reaction: str, place: str) -> tuple[str, str, str]:
    parts = reaction.strip().partition(" ")[0].split(">")
    if len(parts) != 3:
        raise UserError(f"{place}: {reaction[:60]!r} is no reaction: write reactants>reagents>products")
    return parts[0], parts[1], parts[2]


def _pickle(source: str) -> UserError:
    return UserError(
        f"{source} is a pickle, and reading one runs whatever code is in it: where you trust it, write a CSV file "
        "with pandas.read_pickle(...), rdkit.Chem.MolToSmiles on its columns reactants_mol and products_mol and "
        ".to_csv(..., index=False), and set source to that"
    )

# SPDX-License-Identifier: Apache-2.0
"""The commands of `bionemo analysis`: read files, compute, write tables and plots, print a summary.

`load_model` is called after the inputs and outputs were checked. The other parameters are the options of the command.
"""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bionemo.common.errors import UserError
from bionemo.data.letters import note_letters
from bionemo.inference.analysis import contacts, files
from bionemo.inference.analysis.maps import make_reducer, project_to_2d, read_embeddings
from bionemo.inference.analysis.protein import tokenize_protein
from bionemo.inference.analysis.variant_files import infer_wild_type, parse_scores, rank_correlation, read_variants
from bionemo.inference.analysis.variants import AMINO_ACIDS, parse_mutations, scan, score_variants
from bionemo.inference.batching import max_tokens, tokenize, too_long_error
from bionemo.inference.model import TrainedModel
from bionemo.inference.outputs import Floats
from bionemo.inference.progress import progress_bar

LoadModel = Callable[[], TrainedModel]
EMBEDDING_BATCH = 64  # sequences between two updates of the progress bar


def run_variants(
    load_model: LoadModel, *, variants: Path, sequence: str | None, column: str, score_column: str | None, method: str,
    offset: int, output: Path, overwrite: bool,
) -> None:  # fmt: skip
    """Score the variants of a file."""
    plot = _plot_path(output)
    files.refuse_existing([output, plot], overwrite, [variants])
    table, sequences = read_variants(variants)
    if "zero_shot" in table.columns:
        raise UserError(f"{table.path} has a column 'zero_shot' already: rename it")
    mutants = table.column(column, "name one with --column")
    name = score_column or "score"
    has_scores = score_column is not None or name in table.columns
    measured = None
    if has_scores:
        from bionemo.inference.analysis.plots import plot_scores

        cells = table.column(name, "name one with --score-column")
        measured = parse_scores(table, cells, "leave the cell empty, or name another column with --score-column")
    if sequence is not None:
        wild_type = files.read_sequence(sequence)
    elif sequences is not None:
        wild_type = infer_wild_type(sequences, mutants, table.locations, offset)
    else:
        raise UserError("the wild type is unknown: give it with --sequence, a FASTA file or its letters")
    if score_column is not None and measured is not None and np.isnan(measured).all():
        raise UserError(f"{table.path}: column {name!r} has no number: name another with --score-column")
    positions = {
        mutation.position
        for text, location in zip(mutants, table.locations, strict=True)
        for mutation in parse_mutations(text, location)
    }
    with files.staged_file(output) as file:
        model = load_model()
        note_letters(model.network.vocabulary, [(wild_type, "the wild type")])
        with progress_bar("scoring", len(positions), "residues") as advance:
            scores = score_variants(model, wild_type, mutants, method, offset, table.locations, advance)
        rows = [[*row, score] for row, score in zip(table.rows, _format(scores), strict=True)]
        files.write_table(file, [*table.columns, "zero_shot"], rows)
    print(f"{len(scores):,} variants: {output}")
    if measured is not None and not np.isnan(measured).all():
        rho, count = rank_correlation(scores, measured)
        with files.staged_file(plot) as file:
            plot_scores(file, scores, measured, rho, name)
        print(f"Spearman's rho {rho:.4f} with {count:,} measured values of {name!r}: {plot}")


def run_scan(
    load_model: LoadModel, *, sequence: str | None, method: str, offset: int, output: Path, overwrite: bool
) -> None:
    """Score every substitution at every position of a protein."""
    from bionemo.inference.analysis.plots import plot_scan

    if sequence is None:
        raise UserError("--scan needs the wild type: give it with --sequence, a FASTA file or its letters")
    plot, wild_type = _plot_path(output), files.read_sequence(sequence)
    files.refuse_existing([output, plot], overwrite, [Path(sequence)] if sequence else [])
    with files.staged_file(output) as file, files.staged_file(plot) as plot_file:
        model = load_model()
        note_letters(model.network.vocabulary, [(wild_type, "the wild type")])
        wild_type = wild_type.upper()
        with progress_bar("scanning", len(wild_type), "residues") as advance:
            scores = scan(model, wild_type, method, advance)
        numbered = enumerate(zip(wild_type, scores, strict=True), 1 + offset)
        rows = [[number, letter, *_format(row)] for number, (letter, row) in numbered]
        files.write_table(file, ["position", "wild_type", *AMINO_ACIDS], rows)
        plot_scan(plot_file, scores, wild_type, offset)
    print(f"{len(wild_type):,} residues: {output}, {plot}")


def run_contacts(
    load_model: LoadModel, *, input_path: Path, head: Path | None, maps: Path | None, output: Path, overwrite: bool
) -> None:
    """Predict the contacts of each protein."""
    from bionemo.inference.analysis.plots import plot_contacts

    contact_head, weights = contacts.read_contact_head(head) if head else (None, None)
    records = files.read_fasta(input_path)
    names = _file_names(records, input_path)
    outputs = [(output / f"{name}.csv", output / f"{name}.png") for name in names]
    files.refuse_existing([path for pair in outputs for path in pair], overwrite)
    known_maps = _read_maps(maps, names) if maps else None
    model = load_model()
    if weights is not None and weights != model.weights_checksum:
        raise UserError(f"{model.path} has other weights than the model of {head}: fit a contact head for this model")
    precisions: dict[int, list[list[float]]] = {contacts.SEPARATION: [], contacts.LONG_RANGE: []}
    for record in sorted(records, key=_length, reverse=True):  # check all before the first is computed
        tokenize_protein(model, record["sequence"], record["id"])
    _note_letters(model, records, input_path)
    with progress_bar("predicting contacts", len(records), "proteins") as advance:
        for number, (record, name) in enumerate(zip(records, names, strict=True)):
            predicted = contacts.predict_contacts(model, record["sequence"], contact_head, record["id"])
            known = None
            if known_maps is not None:
                known = contacts.check_contact_map(known_maps[number], len(predicted), f"the map {name}.npy")
                for nearest, found in precisions.items():
                    if np.triu(known == 1, nearest).any():
                        found.append([contacts.precision(predicted, known, part, nearest) for part in (1, 5)])
            table, plot = outputs[number]
            with files.staged_file(table) as file, files.staged_file(plot) as plot_file:
                i, j = np.triu_indices(len(predicted), 1)
                pairs = np.stack([i + 1, j + 1, predicted[i, j]], axis=1)
                np.savetxt(file, pairs, fmt="%d,%d,%.6g", header="i,j,probability", comments="")
                plot_contacts(plot_file, predicted, record["id"], known)
            advance(1)
    print(f"{_count(len(records), 'contact map')}: {output}")
    if known_maps is not None:
        print("precision of the most likely contacts (L: length of the protein)")
        for nearest, found in precisions.items():
            result = f"unknown, no map has contacts at least {nearest} apart"
            if found:
                top, fifth = np.mean(found, axis=0)
                result = f"first L {top:.4f}, first L/5 {fifth:.4f} ({_count(len(found), 'protein')})"
            print(f"  residues at least {nearest:2} apart: {result}")


def run_contacts_fit(load_model: LoadModel, *, input_path: Path, maps: Path, output: Path, overwrite: bool) -> None:
    """Fit a contact head to proteins of known structure."""
    files.refuse_existing([output], overwrite, [input_path])
    records = files.read_fasta(input_path)
    known_maps = _read_maps(maps, _file_names(records, input_path))
    model = load_model()
    _note_letters(model, records, input_path)
    with progress_bar("computing attention", len(records), "proteins") as advance:
        head = contacts.fit_contact_head(model, [record["sequence"] for record in records], known_maps, advance)
    contacts.write_contact_head(output, head, model.weights_checksum)
    used = sum(weight != 0 for weight in head["weight"])
    print(f"{used} of {len(head['weight'])} attention heads have a weight: {output}")


def run_map(
    load_model: LoadModel | None, *, input_path: Path, pooling: str, method: str, neighbors: int, seed: int,
    color: str | None, table: Path | None, output: Path, overwrite: bool,
) -> None:  # fmt: skip
    """Project the embeddings of many sequences to two dimensions."""
    from bionemo.inference.analysis.plots import plot_map

    plot = _plot_path(output)
    files.refuse_existing([output, plot], overwrite, [input_path, table])
    if table and not color:
        raise UserError("--table needs --color: name the column of the colors")
    make_reducer(method, neighbors, seed)  # reports a missing installation before anything is computed
    own_color = None if table else color
    with files.staged_file(output) as file, files.staged_file(plot) as plot_file:
        if files.is_fasta(input_path):
            ids, embeddings, colors = _embed(load_model, input_path, pooling, own_color)
        else:
            ids, embeddings, colors = read_embeddings(input_path, own_color)
        if table:
            colors = _read_colors(table, color or "", ids, input_path)
        points_N2 = project_to_2d(embeddings, method, neighbors, seed)
        extra = [[each] for each in colors] if colors else [[]] * len(ids)
        rows = [[name, *_format(point), *more] for name, point, more in zip(ids, points_N2, extra, strict=True)]
        files.write_table(file, ["id", "x", "y", *([color] if colors and color else [])], rows)
        plot_map(plot_file, points_N2, colors, color or "")
    print(f"{len(ids):,} sequences: {output}, {plot}")


def _embed(
    load_model: LoadModel | None, path: Path, pooling: str, color: str | None
) -> tuple[list[str], Floats, list[str] | None]:
    """Return the ids, embeddings and colors of the records of a FASTA file."""
    if load_model is None:
        raise UserError(f"{path} holds sequences: add MODEL, which embeds them")
    records = files.read_fasta(path)
    if color and not any(color in record for record in records):
        raise UserError(f"{path}: no header has {color}=...: name another key, or add --table")
    model = load_model()
    max_length = max_tokens(model.network)
    ids = [tokenize(model.network.vocabulary, record["sequence"], record["id"]) for record in records]
    longest = max(range(len(ids)), key=lambda number: len(ids[number]))
    if len(ids[longest]) > max_length:
        remedy = "embed the file with `bionemo predict`, which can truncate it, and use its .npz file"
        raise too_long_error(records[longest]["id"], len(ids[longest]), max_length, remedy)
    _note_letters(model, records, path)
    parts = []
    with progress_bar("embedding", len(records), "sequences") as advance:
        for first in range(0, len(records), EMBEDDING_BATCH):
            batch = ids[first : first + EMBEDDING_BATCH]
            parts.append(model.embed(batch, pooling))
            advance(len(batch))
    colors = [record.get(color, "") for record in records] if color else None
    return [record["id"] for record in records], np.concatenate(parts), colors


def _note_letters(model: TrainedModel, records: list[dict[str, str]], path: Path) -> None:
    note_letters(model.network.vocabulary, [(record["sequence"], f"{path}: {record['id']}") for record in records])


def _read_colors(path: Path, color: str, ids: list[str], input_path: Path) -> list[str]:
    """Return the cell of each id in the column of the colors; "" for ids that are not in the table."""
    table = files.read_nonempty_table(path)
    known, colors = table.column("id", "rename the column of the ids"), table.column(color, "name one with --color")
    cells = dict(zip(known, colors, strict=True))
    if not cells.keys() & set(ids):
        raise UserError(f"{path}: none of its ids is in {input_path}: use the same ids in both")
    return [cells.get(each, "") for each in ids]


def _format(values: Floats) -> list[str]:
    """Return numbers as text with the precision of fp32."""
    return [f"{value:.7g}" for value in values.tolist()]


def _plot_path(output: Path) -> Path:
    if not output.name:
        raise UserError(f"--output {output} is a directory: name a file")
    if output.suffix == ".png":
        raise UserError(f"--output {output} is the table: name it .csv, the plot is written beside it")
    return output.with_suffix(".png")


def _file_names(records: list[dict[str, str]], path: Path) -> list[str]:
    """Return a file name for each record: its id with unusual characters replaced by _."""
    names = [re.sub(r"[^\w.|=+-]", "_", record["id"]).lstrip(".")[:200] for record in records]
    if invalid := [name for name, count in Counter(names).items() if count > 1 or not name]:
        raise UserError(f"{path}: several records would be written as {invalid[0]!r}: give each a different id")
    return names


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _length(record: dict[str, str]) -> int:
    return len(record["sequence"])


def _read_maps(directory: Path, names: list[str]) -> list[np.ndarray]:
    maps = []
    for name in names:
        path = directory / f"{name}.npy"
        try:
            maps.append(np.load(path, allow_pickle=False))
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror or error}): each record needs a map") from error
        except (ValueError, EOFError) as error:
            raise UserError(f"{path} is not a .npy file of numbers: write it with numpy.save") from error
    return maps

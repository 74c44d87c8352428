# SPDX-License-Identifier: Apache-2.0
"""The commands of `bionemo analysis`: read files, compute, write tables and plots, print a summary.

The model is loaded after the inputs and outputs were checked.
"""

import re
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from bionemo.analysis import contacts, files, plots
from bionemo.analysis.maps import axis_labels, make_reducer, project_to_2d, read_embeddings, write_anndata
from bionemo.analysis.variant_files import (
    describe_unusual,
    infer_wild_type,
    parse_scores,
    parse_variants,
    rank_correlation,
    read_variants,
)
from bionemo.common.console import notify
from bionemo.common.errors import UserError, describe, shorten
from bionemo.common.figures import FORMATS
from bionemo.data.letters import note_letters
from bionemo.data.molecules.content_checks import report_unusable
from bionemo.inference import load as loading
from bionemo.inference.batching import max_tokens, tokenize
from bionemo.inference.contacts import predict_contacts
from bionemo.inference.fingerprint import provenance, write_provenance
from bionemo.inference.invalid_molecules import find_invalid
from bionemo.inference.model import TrainedModel
from bionemo.inference.outputs import Floats
from bionemo.inference.progress import progress_bar
from bionemo.inference.protein import tokenize_protein
from bionemo.inference.variants import AMINO_ACIDS, scan, score_variants
from bionemo.tokenizers import SmilesTokenizer

_BATCH = 64  # sequences between two updates of the progress bar
_NOT_SETTINGS = ("command", "device", "model", "output", "overwrite", "precision")  # options that change no result


def run_variants(options: Namespace) -> None:
    """Score the variants of a file."""
    output, plot = _outputs(options.output)
    files.refuse_existing([output, plot], options.overwrite, [options.variants])
    table, sequences = read_variants(options.variants)
    if "zero_shot" in table.columns:
        raise UserError(f"{table.path} has a column 'zero_shot' already: rename it")
    mutants = table.column(options.column, "name one with --column")
    name = options.score_column or "score"
    has_scores = options.score_column is not None or name in table.columns
    measured = None
    if has_scores:
        cells = table.column(name, "name one with --score-column")
        measured = parse_scores(table, cells, "leave the cell empty, or name another column with --score-column")
    variants = parse_variants(table, mutants)
    kept = [row for row, mutations in enumerate(variants) if mutations is not None]
    scored, locations = [mutants[row] for row in kept], [table.locations[row] for row in kept]
    if options.sequence is not None:
        wild_type = files.read_sequence(options.sequence)
    elif sequences is not None:
        wild_type = infer_wild_type([sequences[row] for row in kept], scored, locations, options.offset)
    else:
        raise UserError("the wild type is unknown: give it with --sequence, a FASTA file or its letters")
    if options.score_column is not None and measured is not None and np.isnan(measured).all():
        raise UserError(f"{table.path}: column {name!r} has no number: name another with --score-column")
    positions = {mutation.position for mutations in variants for mutation in mutations or []}
    with files.staged_file(output) as file:
        model = _load(options)
        note_letters(model.network.vocabulary, [(wild_type, "the wild type")])
        with progress_bar("scoring", len(positions), "residues") as advance:
            scores = score_variants(model, wild_type, scored, options.method, options.offset, locations, advance)
        zero_shot = dict(zip(kept, _format(scores), strict=True))
        rows = [[*row, zero_shot.get(number, "")] for number, row in enumerate(table.rows)]
        files.write_table(file, [*table.columns, "zero_shot"], rows)
    write_provenance(output, _provenance(options, model))
    print(f"{len(rows):,} variants: {output}")
    notify(*describe_unusual(variants, table.locations))
    if measured is None or np.isnan(measured).all():
        return
    measured = measured[kept]
    unchanged = [all(each.wild == each.mutant for each in variants[row] or []) for row in kept]
    if equal := int((~np.isnan(measured[unchanged])).sum()):
        notify(f"left out of rho: {_count(equal, 'variant')} with the sequence of the wild type, which score 0")
        measured = np.where(unchanged, np.nan, measured)
    rho, count = rank_correlation(scores, measured)
    if np.isnan(rho):
        print(f"no rank correlation: it needs variants with different values of {name!r} and different scores")
        return
    plotted = _draw(plots.plot_scores, plot, scores, measured, name)
    print(f"Spearman's rho {rho:.4f} with {count:,} measured values of {name!r}: {plotted}")


def run_scan(options: Namespace) -> None:
    """Score every substitution at every position of a protein."""
    if options.sequence is None:
        raise UserError("--scan needs the wild type: give it with --sequence, a FASTA file or its letters")
    (output, plot), wild_type = _outputs(options.output), files.read_sequence(options.sequence)
    files.refuse_existing([output, plot], options.overwrite, [Path(options.sequence)])
    with files.staged_file(output) as file:
        model = _load(options)
        note_letters(model.network.vocabulary, [(wild_type, "the wild type")])
        wild_type = wild_type.upper()
        with progress_bar("scanning", len(wild_type), "residues") as advance:
            scores = scan(model, wild_type, options.method, advance)
        numbered = enumerate(zip(wild_type, scores, strict=True), 1 + options.offset)
        rows = [[number, letter, *_format(row)] for number, (letter, row) in numbered]
        files.write_table(file, ["position", "wild_type", *AMINO_ACIDS], rows)
    write_provenance(output, _provenance(options, model))
    plotted = _draw(plots.plot_scan, plot, scores, wild_type, options.offset)
    print(f"{len(wild_type):,} residues: {output}, {plotted}")


def run_contacts(options: Namespace) -> None:
    """Predict the contacts of each protein."""
    contact_head, weights = contacts.read_contact_head(options.head) if options.head else (None, None)
    records = files.read_fasta(options.input_path)
    names = _file_names(records, options.input_path)
    outputs = [(options.output / f"{name}.csv", options.output / f"{name}.png") for name in names]
    files.refuse_existing([path for pair in outputs for path in pair], options.overwrite)
    known_maps = _read_maps(options.maps, names) if options.maps else None
    model = _load(options)
    if weights is not None and weights != model.weights_checksum:
        raise UserError(
            f"{model.path} has other weights than the model of {options.head}: fit a contact head for this model"
        )
    precisions: dict[int, list[list[float]]] = {contacts.SEPARATION: [], contacts.LONG_RANGE: []}
    for record in sorted(records, key=lambda each: -len(each["sequence"])):  # check all before the first is computed
        tokenize_protein(model, record["sequence"], record["id"])
    _note_letters(model, records, options.input_path)
    with progress_bar("predicting contacts", len(records), "proteins") as advance:
        for number, (record, name) in enumerate(zip(records, names, strict=True)):
            predicted = predict_contacts(model, record["sequence"], contact_head, record["id"])
            known = None
            if known_maps is not None:
                known = contacts.check_contact_map(known_maps[number], len(predicted), f"the map {name}.npy")
                for nearest, found in precisions.items():
                    if np.triu(known == 1, nearest).any():
                        found.append([contacts.precision(predicted, known, part, nearest) for part in (1, 5)])
            table, plot = outputs[number]
            with files.staged_file(table) as file:
                i, j = np.triu_indices(len(predicted), 1)
                pairs = np.stack([i + 1, j + 1, predicted[i, j]], axis=1)
                np.savetxt(file, pairs, fmt="%d,%d,%.6g", header="i,j,probability", comments="")
            write_provenance(table, _provenance(options, model))
            plotted = _draw(plots.plot_contacts, plot, predicted, record["id"], known)
            advance(1)
    missing = plotted if plotted != str(plot) else ""
    print(f"{_count(len(records), 'contact map')}: {' '.join(filter(None, [str(options.output), missing]))}")
    if known_maps is not None:
        print("precision of the most likely contacts (L: length of the protein)")
        for nearest, found in precisions.items():
            result = f"unknown, no map has contacts at least {nearest} apart"
            if found:
                top, fifth = np.mean(found, axis=0)
                result = f"first L {top:.4f}, first L/5 {fifth:.4f} ({_count(len(found), 'protein')})"
            print(f"  residues at least {nearest:2} apart: {result}")


def run_contacts_fit(options: Namespace) -> None:
    """Fit a contact head to proteins of known structure."""
    files.refuse_existing([options.output], options.overwrite, [options.input_path])
    records = files.read_fasta(options.input_path)
    known_maps = _read_maps(options.maps, _file_names(records, options.input_path))
    model = _load(options)
    _note_letters(model, records, options.input_path)
    with progress_bar("computing attention", len(records), "proteins") as advance:
        head = contacts.fit_contact_head(model, [record["sequence"] for record in records], known_maps, advance)
    contacts.write_contact_head(options.output, head, model.weights_checksum, _provenance(options, model))
    used = sum(weight != 0 for weight in head["weight"])
    print(f"{used} of {len(head['weight'])} attention heads have a weight: {options.output}")


def run_map(options: Namespace) -> None:
    """Project the embeddings of many sequences to two dimensions."""
    output, plot = _outputs(options.output)
    files.refuse_existing([output, plot], options.overwrite, [options.input_path, options.table])
    if options.table and not options.color:
        raise UserError("--table needs --color: name the column of the colors")
    make_reducer(options.method, options.neighbors, options.seed)  # reports a missing installation at once
    own_color = None if options.table else options.color
    with files.staged_file(output) as file:
        if files.is_fasta(options.input_path):
            ids, embeddings, colors, model, longer = _embed(options, own_color)
        else:
            (ids, embeddings, colors), model, longer = read_embeddings(options.input_path, own_color), None, 0
        found = _provenance(options, model, longer)
        if options.table:
            colors = _read_colors(options.table, options.color or "", ids, options.input_path)
        points_N2 = project_to_2d(embeddings, options.method, options.neighbors, options.seed)
        if output.suffix == ".h5ad":
            cells = {options.color: plots.numbers_of(colors) or colors} if colors else {}
            write_anndata(file, {"_index": ids, **cells}, embeddings, f"X_{options.method}", points_N2, found)
        else:
            extra = [[each] for each in colors] if colors else [[]] * len(ids)
            rows = [[name, *_format(point), *more] for name, point, more in zip(ids, points_N2, extra, strict=True)]
            files.write_table(file, ["id", "x", "y", *([options.color] if colors and options.color else [])], rows)
    write_provenance(output, found)
    labels = axis_labels(options.method, embeddings, points_N2)
    plotted = _draw(plots.plot_map, plot, points_N2, labels, colors, options.color or "")
    print(f"{len(ids):,} sequences: {output}, {plotted}")


def run_label(options: Namespace) -> None:
    """Apply the head of a fine-tuning run to new sequences."""
    from bionemo.finetuning.load_head import check_encoder, predict_labels, read_records, read_trained_head

    files.refuse_existing([options.output], options.overwrite, [options.input_path])
    trained = read_trained_head(options.head)
    with files.staged_file(options.output) as file:
        try:
            model, rows = _load(options, options.model or trained.encoder), []
        except UserError as error:
            remedy = "" if options.model else f"; {options.head} was trained with this model: give another MODEL"
            raise UserError(f"{error}{remedy}") from error
        check_encoder(trained, model.path, model.weights_checksum)
        is_molecules = isinstance(model.network.vocabulary, SmilesTokenizer)
        ids, sequences = read_records(options.input_path, not is_molecules)
        unusable = find_invalid(model.network, sequences)
        for problem, numbers in unusable.items():
            name = f"record {numbers[0]:,}, {shorten(sequences[numbers[0]])}"
            source, policy = str(options.input_path), options.on_invalid
            notify(report_unusable(source, problem, len(numbers), len(ids), name, policy, "--on-invalid"))
        if unusable and options.on_invalid == "skip":
            kept = sorted({*range(len(ids))}.difference(*unusable.values()))
            ids, sequences = [ids[number] for number in kept], [sequences[number] for number in kept]
            if not ids:
                raise UserError(f"{options.input_path}: no SMILES is left: correct them, or use --on-invalid=keep")
        # Errors before anything is computed. Molecules are truncated as in training; proteins have --max-length.
        tokens = model.ids(sequences, [f"{options.input_path}: {name}" for name in ids], truncate=is_molecules)
        with progress_bar("predicting", len(ids), "sequences") as advance:
            for first in range(0, len(ids), _BATCH):
                batch = slice(first, first + _BATCH)
                labels = predict_labels(model, trained, tokens[batch])
                rows += [[name, *label] for name, label in zip(ids[batch], labels, strict=True)]
                advance(len(labels))
        files.write_table(file, ["id", *trained.columns], rows)
        write_provenance(options.output, _provenance(options, model, _count_longer(model, sequences)))
    print(f"{len(rows):,} sequences: {options.output}")


def _load(options: Namespace, path: Path | None = None) -> TrainedModel:
    """Load the model of the command line, or another one."""
    return loading.load(path or options.model, options.device, options.precision, options.max_length)


def _provenance(options: Namespace, model: TrainedModel | None, longer: int = 0) -> dict[str, Any]:
    """Return the provenance of the output of a command; `longer` is the number of truncated sequences."""
    return provenance(model, {key: x for key, x in vars(options).items() if key not in _NOT_SETTINGS}, longer)


def _count_longer(model: TrainedModel, sequences: Iterable[str]) -> int:
    """Return the number of sequences that are longer than the model accepts."""
    vocabulary = model.network.vocabulary
    return sum(len(tokenize(vocabulary, text, "")) > max_tokens(model.network) for text in sequences)


def _embed(options: Namespace, color: str | None) -> tuple[list[str], Floats, list[str] | None, TrainedModel, int]:
    """Return ids, embeddings and colors of the records of a FASTA file, the model, and how many were truncated."""
    path = options.input_path
    if options.model is None:
        raise UserError(f"{path} holds sequences: add MODEL, which embeds them")
    records = files.read_fasta(path)
    if color and not any(color in record for record in records):
        raise UserError(f"{path}: no header has {color}=...: name another key, or add --table")
    model = _load(options)
    ids = model.ids(
        [each["sequence"] for each in records], [f"{path}: {each['id']}" for each in records], truncate=True
    )
    parts = []
    with progress_bar("embedding", len(records), "sequences") as advance:
        for first in range(0, len(records), _BATCH):
            batch = ids[first : first + _BATCH]
            parts.append(model.embed(batch, options.pooling))
            advance(len(batch))
    colors = [record.get(color, "") for record in records] if color else None
    longer = _count_longer(model, (record["sequence"] for record in records))
    return [record["id"] for record in records], np.concatenate(parts), colors, model, longer


def _note_letters(model: TrainedModel, records: list[dict[str, str]], path: Path) -> None:
    note_letters(model.network.vocabulary, [(record["sequence"], f"{path}: {record['id']}") for record in records])


def _read_colors(path: Path, color: str, ids: list[str], input_path: Path) -> list[str]:
    """Return the cell of each id in the column of the colors; "" for ids that are not in the table.

    Raises:
        UserError: if the table cannot be read, or has none of the ids, or different values of one of them.
    """
    table = files.read_nonempty_table(path)
    known, colors = table.column("id", "rename the column of the ids"), table.column(color, "name one with --color")
    wanted, rows = set(ids), dict[str, int]()
    for number, name in enumerate(known):
        first = rows.setdefault(name, number)
        if name in wanted and colors[number] != colors[first]:
            where = table.locations[number]
            raise UserError(f"{where}: id {name!r} has another value at {table.locations[first]}: remove one of them")
    if not (found := sum(each in rows for each in ids)):
        raise UserError(f"{path}: none of its ids is in {input_path}: use the same ids in both")
    if found < len(ids):
        notify(f"{path} has {found:,} of {_count(len(ids), 'id')} of {input_path}: the others have no value")
    return [colors[rows[each]] if each in rows else "" for each in ids]


def _format(values: Floats) -> list[str]:
    """Return numbers as text with the precision of fp32."""
    return [f"{value:.7g}" for value in values.tolist()]


def _outputs(output: Path) -> tuple[Path, Path]:
    """Return the paths of the table and the plot; `output` is one of them, by its extension."""
    if not output.name:
        raise UserError(f"--output {output} is a directory: name a file")
    if output.suffix in FORMATS:
        return output.with_suffix(".csv"), output
    return output, output.with_suffix(".png")


def _draw(draw: Callable[..., None], path: Path, *arguments: Any) -> str:
    """Draw a plot; return its path for the summary, or why there is none: the results are complete without it."""
    try:
        draw(path, *arguments)
    except (UserError, OSError) as error:
        return f"(there is no {path}: {describe(error)})"
    return str(path)


def _file_names(records: list[dict[str, str]], path: Path) -> list[str]:
    """Return a file name for each record: its id with unusual characters replaced by _."""
    names = [re.sub(r"[^\w.|=+-]", "_", record["id"]).lstrip(".")[:200] for record in records]
    if invalid := [name for name, count in Counter(names).items() if count > 1 or not name]:
        raise UserError(f"{path}: several records would be written as {invalid[0]!r}: give each a different id")
    return names


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


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

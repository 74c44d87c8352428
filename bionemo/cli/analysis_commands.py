# SPDX-License-Identifier: Apache-2.0
"""The commands of `python -m bionemo.analysis`: files in, tables and pictures out."""

import re
from argparse import Namespace
from collections import Counter
from pathlib import Path

import numpy as np

from bionemo.common.errors import UserError
from bionemo.finetuning.load_head import answer, read_trained_head
from bionemo.inference.analysis.contact_heads import read_head, write_head
from bionemo.inference.analysis.contacts import LONG_RANGE, as_contacts, fit_contact_head, precision, predict_contacts
from bionemo.inference.analysis.files import (
    finished,
    is_fasta,
    read_fasta,
    read_filled,
    read_sequence,
    refuse_existing,
    write_table,
)
from bionemo.inference.analysis.maps import read_embeddings, reducer, to_plane
from bionemo.inference.analysis.pictures import draw_contacts, draw_map, draw_scan, draw_scores
from bionemo.inference.analysis.residues import read_protein
from bionemo.inference.analysis.variant_files import measured, rank_correlation, read_variants, wild_type
from bionemo.inference.analysis.variants import AMINO_ACIDS, mutations, scan, score_variants
from bionemo.inference.batching import room, token_ids
from bionemo.inference.load import load
from bionemo.inference.model import TrainedModel
from bionemo.inference.outputs import Floats
from bionemo.inference.progress import progress

_AT_ONCE = 64  # sequences embedded between two steps of the bar


def _variants(arguments: Namespace) -> None:
    if arguments.scan == (arguments.variants is not None):
        raise UserError("give either --variants FILE or --scan")
    if arguments.scan:
        _scan(arguments)
        return
    picture = _picture(arguments.output)
    refuse_existing([arguments.output, picture], arguments.overwrite)
    table, sequences = read_variants(arguments.variants)
    if "zero_shot" in table.columns:
        raise UserError(f"{table.path} has a column 'zero_shot' already: give it another name")
    variants = table.column(arguments.column, "name one with --column")
    name = arguments.score_column or "score"
    known = arguments.score_column is not None or name in table.columns
    values = measured(table, table.column(name, "name one with --score-column")) if known else None
    if arguments.sequence is not None:
        sequence = read_sequence(arguments.sequence)
    elif sequences is not None:
        sequence = wild_type(sequences, variants, table.places, arguments.offset)
    else:
        raise UserError("the wild type is not known: give it with --sequence, a FASTA file or its letters")
    if arguments.score_column is not None and values is not None and np.isnan(values).all():
        raise UserError(f"{table.path}: column {name!r} holds no number: name another with --score-column")
    residues = {
        each.position for text, place in zip(variants, table.places, strict=True) for each in mutations(text, place)
    }
    with finished(arguments.output) as file:
        model = _model(arguments)
        with progress("scoring", len(residues), "residues") as advance:
            scores = score_variants(
                model, sequence, variants, arguments.method, arguments.offset, table.places, advance
            )
        rows = [[*row, score] for row, score in zip(table.rows, _short(scores), strict=True)]
        write_table(file, [*table.columns, "zero_shot"], rows)
    print(f"{len(scores):,} variants: {arguments.output}")
    if values is not None and not np.isnan(values).all():
        rho, count = rank_correlation(scores, values)
        with finished(picture) as file:
            draw_scores(file, scores, values, rho, name)
        print(f"Spearman's rho {rho:.4f} with {count:,} measured values of {name!r}: {picture}")


def _scan(arguments: Namespace) -> None:
    if arguments.sequence is None:
        raise UserError("--scan needs the wild type: give it with --sequence, a FASTA file or its letters")
    picture, sequence, offset = _picture(arguments.output), read_sequence(arguments.sequence), arguments.offset
    refuse_existing([arguments.output, picture], arguments.overwrite)
    with finished(arguments.output) as file, finished(picture) as drawn:
        model = _model(arguments)
        with progress("scanning", len(sequence), "residues") as advance:
            scores = scan(model, sequence, arguments.method, advance)
        numbered = enumerate(zip(sequence, scores, strict=True), 1 + offset)
        rows = [[number, letter, *_short(row)] for number, (letter, row) in numbered]
        write_table(file, ["position", "wild_type", *AMINO_ACIDS], rows)
        draw_scan(drawn, scores, sequence, offset)
    print(f"{len(sequence):,} residues: {arguments.output}, {picture}")


def _contacts(arguments: Namespace) -> None:
    head = read_head(arguments.head) if arguments.head else None
    records = read_fasta(arguments.input)
    names = _file_names(records, arguments.input)
    outputs = [(arguments.output / f"{name}.csv", arguments.output / f"{name}.png") for name in names]
    refuse_existing([path for both in outputs for path in both], arguments.overwrite)
    maps = _maps(arguments.maps, names) if arguments.maps else None
    model, precisions = _model(arguments), []
    for record in records:  # before any is computed
        read_protein(model, record["sequence"], record["id"])
    with progress("predicting contacts", len(records), "proteins") as advance:
        for number, (record, name) in enumerate(zip(records, names, strict=True)):
            predicted = predict_contacts(model, record["sequence"], head, record["id"])
            known = as_contacts(maps[number], len(predicted), f"the map {name}.npy") if maps else None
            table, picture = outputs[number]
            with finished(table) as file, finished(picture) as drawn:
                i, j = np.triu_indices(len(predicted), 1)
                pairs = np.stack([i + 1, j + 1, predicted[i, j]], axis=1)
                np.savetxt(file, pairs, fmt="%d,%d,%.6g", header="i,j,probability", comments="")
                draw_contacts(drawn, predicted, record["id"], known)
            if known is not None:
                precisions.append([precision(predicted, known), precision(predicted, known, 5)])
            advance(1)
    print(f"{len(records):,} contact maps: {arguments.output}")
    if found := [each for each in precisions if not np.isnan(each).any()]:
        top, fifth = np.mean(found, axis=0)
        print(f"precision of the top L long-range contacts {top:.4f}, of L/5 {fifth:.4f} ({len(found):,} proteins)")
    elif maps is not None:
        print(f"precision unknown: no map has known pairs {LONG_RANGE} and more residues apart")


def _fit(arguments: Namespace) -> None:
    refuse_existing([arguments.output], arguments.overwrite)
    records = read_fasta(arguments.input)
    maps = _maps(arguments.maps, _file_names(records, arguments.input))
    model = _model(arguments)
    with progress("reading attention", len(records), "proteins") as advance:
        head = fit_contact_head(model, [record["sequence"] for record in records], maps, advance)
    write_head(arguments.output, head)
    used = sum(weight != 0 for weight in head["weight"])
    print(f"{used} of {len(head['weight'])} heads count: {arguments.output}")


def _map(arguments: Namespace) -> None:
    picture, color = _picture(arguments.output), arguments.color
    refuse_existing([arguments.output, picture], arguments.overwrite)
    if arguments.table and not color:
        raise UserError("--table needs --color: name the column to colour by")
    reducer(arguments.method, arguments.neighbors, arguments.seed)  # is it here? before anything is embedded
    own = None if arguments.table else color
    with finished(arguments.output) as file, finished(picture) as drawn:
        if is_fasta(arguments.input):
            ids, embeddings, colors = _embedded(arguments, own)
        else:
            ids, embeddings, colors = read_embeddings(arguments.input, own)
        if arguments.table:
            colors = _colors_of_table(arguments, ids)
        places = to_plane(embeddings, arguments.method, arguments.neighbors, arguments.seed)
        extra = [[each] for each in colors] if colors else [[]] * len(ids)
        rows = [[name, *_short(place), *more] for name, place, more in zip(ids, places, extra, strict=True)]
        write_table(file, ["id", "x", "y", *([color] if colors else [])], rows)
        draw_map(drawn, places, colors, color or "")
    print(f"{len(ids):,} sequences: {arguments.output}, {picture}")


def _label(arguments: Namespace) -> None:
    refuse_existing([arguments.output], arguments.overwrite)
    trained, records = read_trained_head(arguments.head), read_fasta(arguments.input)
    arguments.model = arguments.model or trained.encoder
    with finished(arguments.output) as file:
        model, rows = _model(arguments), []
        with progress("answering", len(records), "sequences") as advance:
            for first in range(0, len(records), _AT_ONCE):
                some = records[first : first + _AT_ONCE]
                answers = answer(model, trained, [record["sequence"] for record in some])
                rows += [[record["id"], *each] for record, each in zip(some, answers, strict=True)]
                advance(len(some))
        columns = ["id", "answer", "probability"]
        filled = 3 if any(row[2] for row in rows) else 2
        write_table(file, columns[:filled], [row[:filled] for row in rows])
    print(f"{len(rows):,} sequences: {arguments.output}")


COMMANDS = {"variants": _variants, "contacts": _contacts, "contacts-fit": _fit, "map": _map, "label": _label}


def _embedded(arguments: Namespace, color: str | None) -> tuple[list[str], Floats, list[str] | None]:
    """Ids, embeddings, and what to colour by, of a FASTA file."""
    if arguments.model is None:
        raise UserError(f"{arguments.input} holds sequences: give --model, which embeds them")
    records = read_fasta(arguments.input)
    if color and not any(color in record for record in records):
        raise UserError(f"{arguments.input}: no header has {color}=...: name another key, or give --table")
    model = _model(arguments)
    most = room(model.network)
    for record in records:  # before any is computed
        count = len(token_ids(model.network.vocabulary, record["sequence"], record["id"]))
        if count > most:
            raise UserError(
                f"{record['id']} has {count:,} tokens, the model reads {most:,} at most: embed the file with "
                "`python -m bionemo.predict`, which can cut it, and give the .npz file that it writes"
            )
    parts = []
    with progress("embedding", len(records), "sequences") as advance:
        for first in range(0, len(records), _AT_ONCE):
            texts = [record["sequence"] for record in records[first : first + _AT_ONCE]]
            parts.append(model.embed(texts, arguments.pooling))
            advance(len(texts))
    colors = [record.get(color, "") for record in records] if color else None
    return [record["id"] for record in records], np.concatenate(parts), colors


def _colors_of_table(arguments: Namespace, ids: list[str]) -> list[str]:
    """Cells of the column to colour by; nothing for a sequence that is not in the table."""
    table = read_filled(arguments.table)
    known, colors = table.column("id", "call the ids so"), table.column(arguments.color, "name one with --color")
    cells = dict(zip(known, colors, strict=True))
    if not cells.keys() & set(ids):
        raise UserError(f"{arguments.table}: none of its ids is in {arguments.input}: do both name the same?")
    return [cells.get(each, "") for each in ids]


def _model(arguments: Namespace) -> TrainedModel:
    return load(arguments.model, arguments.device, arguments.precision, arguments.longest)


def _short(values: Floats) -> list[str]:
    """As text, of no more digits than fp32 has."""
    return [f"{value:.7g}" for value in values.tolist()]


def _picture(output: Path) -> Path:
    """Name of the picture beside a table."""
    if output.suffix == ".png":
        raise UserError(f"--output {output} is the table: name it .csv, the picture goes beside it")
    return output.with_suffix(".png")


def _file_names(records: list[dict[str, str]], path: Path) -> list[str]:
    """What the files of each record are called: its id, with _ for what no name of a file should hold."""
    names = [re.sub(r"[^\w.|=+-]", "_", record["id"]).lstrip(".")[:200] for record in records]
    if doubled := [name for name, count in Counter(names).items() if count > 1 or not name]:
        raise UserError(f"{path}: several records would be written as {doubled[0]!r}: give each an id of its own")
    return names


def _maps(directory: Path, names: list[str]) -> list[np.ndarray]:
    """Known contacts of each record."""
    maps = []
    for name in names:
        path = directory / f"{name}.npy"
        try:
            maps.append(np.load(path, allow_pickle=False))
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror or error}): each record needs a map") from error
        except (ValueError, EOFError) as error:
            raise UserError(f"{path} is no .npy file of numbers: write it with numpy.save") from error
    return maps

# SPDX-License-Identifier: Apache-2.0
"""Prediction of files in parts, which depend on the input only and are merged into the output, see `processes`."""

import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bionemo.common.errors import UserError, shorten
from bionemo.common.files import create_owned, identity_of, remove_owned
from bionemo.config.schema import InferDataConfig, TaskConfig
from bionemo.data.letters import LetterCounts
from bionemo.data.molecules.content_checks import PROBLEMS, report_unusable
from bionemo.inference import part_files
from bionemo.inference.batching import BatchLimits, max_tokens, tokenize, too_long_error
from bionemo.inference.fingerprint import digest, prediction_settings, provenance
from bionemo.inference.generation import decodings, generate
from bionemo.inference.input_records import Records
from bionemo.inference.invalid_molecules import find_invalid
from bionemo.inference.long_sequences import SET_POLICY, apply_policy, join_pieces, note_long
from bionemo.inference.model import TrainedModel
from bionemo.inference.outputs import GENERATED, is_attention, is_per_token
from bionemo.inference.part_files import COMPLETE, KIND, LONG, NAMES, count_sequences
from bionemo.inference.processes import PartedWork
from bionemo.inference.progress import Advance, no_progress
from bionemo.inference.text_outputs import encode_texts, summarize_matches, summarize_molecules
from bionemo.inference.writers import BY_ID, FORMATS, PredictionResults, check_ids, write_results
from bionemo.tokenizers import Alphabet, SmilesTokenizer

log = logging.getLogger(__name__)
# Letters of a part with outputs per sequence, per token, with generated text, and with attention maps.
_LETTERS = {"sequence": 1 << 20, "token": 1 << 17, "text": 1 << 16, "pair": 1 << 12}
_TEXTS = 1 << 12  # molecules that are checked at once
_ON_INVALID = "model.data.on_invalid"


class Prediction(PartedWork):
    """A prediction of files; for `identity` see `prediction_fingerprint`.

    Attributes:
        output: path of the output file.
    """

    kind: ClassVar[str] = KIND
    unit: ClassVar[str] = "sequences"

    def __init__(
        self, records: Records, task: TaskConfig, data: InferDataConfig, identity: dict[str, Any], model: TrainedModel
    ) -> None:
        self.records, self.task, self.data, self.identity, self.model = records, task, data, identity, model
        self.total, self.digest = len(records), digest(identity)
        self.outputs: list[str] = [*task.outputs]
        suffix = (data.output_format or FORMATS[0]).removesuffix("_by_id")
        name = data.output_fname or f"{records.paths[0].stem}.{suffix}"
        self.output = Path(name).expanduser().absolute()
        self.directory = self.output.with_name(f"{self.output.name}.parts")

    def compute(self, rank: int, ranks: int, advance: Advance) -> None:
        """Compute the parts of a rank, see `PartedWork`; `advance` is called with the number of sequences of a batch.

        Raises:
            UserError: if a sequence is invalid, or too long and `long_sequences` is `error`.
        """
        for number in range(rank, len(self.parts), ranks):
            first, last = self.parts[number]
            if count_sequences(self.files[number], self.digest) is None:
                _compute_part(self, number, range(first, last), advance)
            else:
                advance(last - first)

    def count_missing(self) -> int:
        """Return the number of parts that are not stored."""
        return sum(not file.exists() for file in self.files)

    @property
    def file_format(self) -> str:
        """Format of the output file.

        Raises:
            UserError: if it is not one of FORMATS.
        """
        name = self.data.output_format or self.output.suffix.removeprefix(".")
        if not self.data.output_format and name not in FORMATS:
            raise UserError(
                f"model.data.output_fname={self.data.output_fname} does not end in one of .{', .'.join(FORMATS)}: "
                "change it, or set model.data.output_format"
            )
        return name

    @cached_property
    def parts(self) -> list[tuple[int, int]]:
        """Ranges [first, last) of records with about equal numbers of letters."""
        kinds = {_kind(name) for name in self.outputs}
        size = min(_LETTERS[kind] for kind in kinds)
        ends = np.cumsum(self.records.lengths, dtype=np.int64)
        edges = np.unique(np.searchsorted(ends, np.arange(0, max(int(ends[-1]), 1), size), side="left"))
        firsts = [int(edge) for edge in edges if edge < len(ends)]
        return list(zip(firsts, [*firsts[1:], len(ends)], strict=True))

    @cached_property
    def files(self) -> list[Path]:
        """Part files."""
        return [self.directory / part_files.NAME.format(number) for number in range(len(self.parts))]


def prepare_directory(prediction: Prediction) -> None:
    """Check the output and create the directory of the parts; keep parts of this prediction, delete others.

    Raises:
        UserError: if the output exists or cannot be written, its format cannot hold the outputs, or a protein is too
            long and `long_sequences` is `error`.
    """
    data, outputs = prediction.data, prediction.outputs
    _check_lengths(prediction)
    if prediction.file_format == "csv" and (per_token := [name for name in outputs if _kind(name) == "token"]):
        raise UserError(
            f"a CSV file cannot hold {', '.join(per_token)}, which have a row per token: write .parquet or .npz"
        )
    if prediction.file_format == BY_ID:
        check_ids(prediction.records, outputs)
    maps = [name for name in outputs if _kind(name) == "pair"]
    if maps and prediction.file_format not in (BY_ID, "pkl"):
        raise UserError(
            f"{maps[0]} has another size for each sequence: set model.data.output_format={BY_ID} with this output only"
        )
    if data.long_sequences == "split" and (whole := [name for name in outputs if _kind(name) in ("text", "pair")]):
        raise UserError(
            f"{whole[0]} is not available for pieces of sequences: set model.data.long_sequences to truncate, "
            "drop or error"
        )
    _refuse_existing(prediction)
    directory = prediction.directory
    found = identity_of(directory, KIND)
    if found is not None and found != prediction.identity:
        other = [key for key, value in prediction.identity.items() if found.get(key) != value]
        reason = " and ".join(other)
        log.warning("%s holds parts of another prediction: they are removed (other %s)", directory, reason)
        remove_owned(directory, KIND, NAMES)
    create_owned(directory, KIND, prediction.identity)


def _kind(output: str) -> str:
    """Return the key of `_LETTERS` for an output."""
    if output in GENERATED:
        return "text"
    return "pair" if is_attention(output) else "token" if is_per_token(output) else "sequence"


def note_letters(prediction: Prediction) -> None:
    """Log a note about letters of the input that the model does not know, see `LetterCounts`."""
    records, vocabulary = prediction.records, prediction.model.network.vocabulary
    counts = LetterCounts(vocabulary)
    if isinstance(vocabulary, Alphabet):
        for letters, lengths in records.letters():
            counts.add_letters(letters, lengths)
    elif isinstance(vocabulary, SmilesTokenizer):
        for first in range(0, len(records), _TEXTS):
            counts.add([record.text for record in records.read(first, min(first + _TEXTS, len(records)))])
    if note := counts.note(lambda number: next(records.read(number, number + 1)).id):
        log.warning("%s: %s", records.paths[0], note)


def _check_lengths(prediction: Prediction) -> None:
    """Report proteins that are too long, which have a token for each letter, before any is computed."""
    network = prediction.model.network
    lengths, max_length = prediction.records.lengths, max_tokens(network)
    long = np.flatnonzero((lengths > max_length) & isinstance(network.vocabulary, Alphabet))
    for record in prediction.records.read(long[0], long[0] + 1) if len(long) else ():
        name = f"{record.id} (record {long[0]:,})"
        if prediction.data.long_sequences == "error":
            raise too_long_error(name, len(record.text), max_length, SET_POLICY)
        remedy = f"; model.data.max_length={lengths.max() + 2} accepts all" if network.rotary else ""
        note_long(name, len(long), max_length, prediction.data.long_sequences, remedy)


def _refuse_existing(prediction: Prediction) -> None:
    output = prediction.output
    if output.is_dir():
        raise UserError(f"{output} is a directory: set model.data.output_fname to a file in it")
    if output.exists() and not output.is_file():
        raise UserError(f"{output} is a device or a pipe: set model.data.output_fname to a file")
    for path in prediction.records.paths:
        if output.exists() and os.path.samefile(output, path):
            raise UserError(f"{output} is the input: choose another model.data.output_fname")
    if output.exists() and not prediction.data.overwrite and not _is_merged_from_parts(prediction):
        raise UserError(f"{output} exists: choose another model.data.output_fname, or set model.data.overwrite=True")


def _is_merged_from_parts(prediction: Prediction) -> bool:
    """Return whether an earlier run wrote the output from these parts but did not delete them."""
    directory = prediction.directory
    try:
        same = os.path.samefile(directory / COMPLETE, prediction.output)
    except OSError:
        return False
    return same and identity_of(directory, KIND) == prediction.identity


def _compute_part(prediction: Prediction, number: int, which: range, advance: Advance) -> None:
    data, model = prediction.data, prediction.model
    max_length = max_tokens(model.network)
    records = dict(zip(which, prediction.records.read(which.start, which.stop), strict=True))
    unusable = find_invalid(model.network, [each.text for each in records.values()])
    unusable = {problem: [which[position] for position in found] for problem, found in unusable.items()}
    if data.on_invalid == "error":
        _report(prediction, unusable, len(which))
    if data.on_invalid == "skip":
        for key in itertools.chain(*unusable.values()):
            del records[key]
    names = [f"{record.id} (record {key:,})" for key, record in records.items()]
    ids = [
        tokenize(model.network.vocabulary, record.text, name)
        for record, name in zip(records.values(), names, strict=True)
    ]
    fitted = apply_policy(ids, names, max_length, data.long_sequences)
    if fitted.long and not isinstance(model.network.vocabulary, Alphabet):
        note_long(names[fitted.long[0]], len(fitted.long), max_length, data.long_sequences)
    limits = BatchLimits(data.tokens_per_batch, data.batch_size)
    generated = decodings(prediction.task)
    computed = [name for name in prediction.outputs if name not in GENERATED]
    batches = list(model.compute(fitted.pieces, computed, limits, no_progress if generated else advance))
    empty = {name: np.zeros((0, 1), np.float32) for name in computed}
    columns = {name: np.concatenate([batch[name] for batch in batches or [empty]]) for name in computed}
    columns, tokens = join_pieces(columns, fitted)
    numbers = np.array([*records], np.int64)[fitted.kept]
    molecules: dict[str, np.ndarray] = {}
    for name, decoding in generated.items():
        last = len(molecules) == len(generated) - 1
        progress = advance if last else no_progress
        texts = encode_texts(generate(model, fitted.pieces, decoding, numbers, limits, progress))
        molecules[name] = texts[:, 0] if name == "reconstruction" else texts
    advance(len(which) - len(fitted.pieces))
    found = {problem: np.array(unusable.get(problem, []), np.int64) for problem in PROBLEMS}
    found[LONG] = np.array([*records], np.int64)[fitted.long]
    arrays = {**columns, **molecules, **found, "tokens": tokens, "numbers": numbers}
    part_files.write_part(prediction.files[number], arrays, prediction.digest)


def _report(prediction: Prediction, unusable: Mapping[str, Sequence[int]], total: int) -> list[str]:
    """Return notes about the records whose SMILES the model cannot use, or raise the error, see `report_unusable`."""
    notes = []
    for problem, numbers in unusable.items():
        for record in prediction.records.read(numbers[0], numbers[0] + 1) if numbers else ():
            first, policy = f"record {numbers[0]:,}, {shorten(record.text)}", prediction.data.on_invalid
            notes.append(
                report_unusable(
                    str(prediction.records.paths[0]),
                    problem,
                    len(numbers),
                    total,
                    first,
                    policy,
                    _ON_INVALID,
                    prediction.records.column,
                )
            )
    return notes


def remove_empty_directory(prediction: Prediction) -> None:
    """Remove the directory of the parts if there are none."""
    with suppress(UserError, OSError):
        if not list(prediction.directory.glob("part-*")):
            remove_owned(prediction.directory, KIND, NAMES)


def merge_parts(prediction: Prediction) -> list[str]:
    """Merge all parts into the output, delete them, and return lines with a summary.

    Raises:
        UserError: if a part is damaged, the output exists by now, or all sequences were dropped.
        OSError: if the output cannot be written; the parts are kept.
    """
    lengths = {file: count_sequences(file, prediction.digest) for file in prediction.files}
    if damaged := [file for file, length in lengths.items() if length is None]:
        raise UserError(f"{damaged[0]} is damaged: run the same command again, which computes it again")
    files = [file for file in prediction.files if lengths[file]]
    settings = {"input": prediction.data.dataset_path, **prediction_settings(prediction.task, prediction.data)}
    longer = sum(len(part_files.read_numbers(each, LONG)) for each in prediction.files)
    origin = provenance(prediction.model, settings, longer)
    results = PredictionResults(files, prediction.records, prediction.outputs, origin)
    unusable = {
        name: [*itertools.chain(*(part_files.read_numbers(each, name) for each in prediction.files))]
        for name in PROBLEMS
    }
    for note in _report(prediction, unusable, len(prediction.records)):
        log.warning(note)
    if not results.files:
        remedy = (
            f"{_ON_INVALID} to keep" if any(unusable.values()) else "model.data.long_sequences to truncate or split"
        )
        raise UserError(f"all sequences were dropped: set {remedy}")
    lines = [f"{len(results.tokens):,} sequences: {prediction.output}"]
    for name in (name for name in prediction.outputs if name in GENERATED):
        lines.append(summarize_molecules(name, ((record.text, texts) for record, texts in results.texts(name))))
        if prediction.data.data_fields_map.get("target"):
            lines.append(
                summarize_matches(name, ((record.target or "", texts) for record, texts in results.texts(name)))
            )
    _refuse_existing(prediction)
    write_results(prediction.output, prediction.file_format, results, prediction.directory)
    try:
        remove_owned(prediction.directory, KIND, NAMES)
    except (UserError, OSError) as error:
        log.warning("%s is no longer needed but could not be deleted: %s", prediction.directory, error)
    return lines

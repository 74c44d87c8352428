# SPDX-License-Identifier: Apache-2.0
"""Going through files: parts of the input, each computed by one process and kept, then all of them in one file.

Parts depend on the input alone: however many processes there are, and however often they were stopped, the same parts
are made, and what is there is not made again.
"""

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bionemo.common.errors import UserError
from bionemo.common.files import create_owned, identity_of, remove_owned
from bionemo.config.schema import InferDataConfig, TaskConfig
from bionemo.inference import parts
from bionemo.inference.batching import Limits, room, token_ids
from bionemo.inference.generation import ways, written
from bionemo.inference.identity import digest_of
from bionemo.inference.long_sequences import fit, join, too_long
from bionemo.inference.model import TrainedModel
from bionemo.inference.outputs import PER_TOKEN, WRITTEN
from bionemo.inference.progress import silent
from bionemo.inference.records import Records
from bionemo.inference.text_outputs import as_bytes, tally
from bionemo.inference.writers import FORMATS, Results, write
from bionemo.tokenizers import Alphabet

log = logging.getLogger(__name__)
# Letters of a part, where there is something of each sequence, of each token, or where something is written.
_LETTERS = {"sequence": 1 << 20, "token": 1 << 17, "text": 1 << 16}
_POLL = 0.2  # seconds


@dataclass(frozen=True)
class Prediction:
    """What is computed of what.

    Attributes:
        records: the input.
        task: `model.downstream_task`.
        data: `model.data`.
        identity: see `identity.of_prediction`.
    """

    records: Records
    task: TaskConfig
    data: InferDataConfig
    identity: dict[str, Any]

    @property
    def outputs(self) -> list[str]:
        """Names of what is wanted."""
        return list(self.task.outputs)

    @property
    def output(self) -> Path:
        """The file."""
        if self.data.output_fname:
            return Path(self.data.output_fname).expanduser().absolute()
        return Path.cwd() / f"{self.records.paths[0].stem}.{self.data.output_format or FORMATS[0]}"

    @property
    def kind(self) -> str:
        """Its format.

        Raises:
            UserError: when it is none of FORMATS.
        """
        kind = self.data.output_format or self.output.suffix.removeprefix(".")
        if kind not in FORMATS:
            raise UserError(
                f"model.data.output_fname={self.data.output_fname} ends in none of .{', .'.join(FORMATS)}: choose "
                "one of these, or set model.data.output_format"
            )
        return kind

    @property
    def digest(self) -> str:
        """A short form of the identity, which every part holds."""
        return digest_of(self.identity)

    @property
    def directory(self) -> Path:
        """Where parts are kept until all are there."""
        return self.output.with_name(f"{self.output.name}.parts")

    def parts(self) -> list[tuple[int, int]]:
        """Stretches of records [first, last) of about equal numbers of letters."""
        wanted = set(self.outputs)
        most = _LETTERS["text" if wanted & {*WRITTEN} else "token" if wanted & {*PER_TOKEN} else "sequence"]
        ends = np.cumsum(self.records.lengths, dtype=np.int64)
        edges = np.unique(np.searchsorted(ends, np.arange(0, int(ends[-1]), most), side="left"))
        firsts = [int(edge) for edge in edges if edge < len(ends)]
        return list(zip(firsts, [*firsts[1:], len(ends)], strict=True))

    def file(self, number: int) -> Path:
        """Of a part."""
        return self.directory / parts.name_of(number)


def begin(prediction: Prediction, model: TrainedModel) -> None:
    """See that the output can be written, and leave parts of this very prediction alone there.

    Raises:
        UserError: when there is something of that name, it cannot be written there, or a protein is too long where
            that is an error.
    """
    proteins, most = isinstance(model.network.vocabulary, Alphabet), room(model.network)  # their letters are tokens
    if prediction.data.long_sequences == "error" and proteins:
        long = np.flatnonzero(prediction.records.lengths > most)
        for record in prediction.records.read(long[0], long[0] + 1) if len(long) else ():
            raise too_long(f"{record.id} (record {long[0]:,})", len(record.text), most)
    if prediction.kind == "csv" and (each := set(prediction.outputs) & {*PER_TOKEN}):
        raise UserError(f"a CSV file has no place for the {', '.join(each)} of each token: choose .parquet or .npz")
    if prediction.data.long_sequences == "split" and (some := [x for x in prediction.outputs if x in WRITTEN]):
        raise UserError(f"there is no {some[0]} of pieces: set model.data.long_sequences to truncate, drop or error")
    _refuse_existing(prediction)
    directory = prediction.directory
    found = identity_of(directory, parts.KIND)
    if found is not None and found != prediction.identity:
        other = [key for key, value in prediction.identity.items() if found.get(key) != value]
        log.warning(
            "%s holds parts of another prediction: they are removed (other %s)", directory, " and ".join(other)
        )
        remove_owned(directory, parts.KIND, parts.NAMES)
    create_owned(directory, parts.KIND, prediction.identity)


def _refuse_existing(prediction: Prediction) -> None:
    """Refuse an output that exists, unless it is to be replaced."""
    output = prediction.output
    if output.is_dir():
        raise UserError(f"{output} is a directory: name a file in it with model.data.output_fname")
    if output.exists() and not prediction.data.overwrite and not _is_written_from_parts(prediction):
        raise UserError(f"{output} exists: name another model.data.output_fname, or set model.data.overwrite=True")


def _is_written_from_parts(prediction: Prediction) -> bool:
    """Whether the output was written from these parts by an earlier run that did not delete them."""
    directory = prediction.directory
    try:
        same = os.path.samefile(directory / parts.COMPLETE, prediction.output)
    except OSError:
        return False
    return same and identity_of(directory, parts.KIND) == prediction.identity


def follow(prediction: Prediction, patience: float) -> None:
    """Wait until the first process has begun.

    Raises:
        UserError: when it has not.
    """
    until = time.monotonic() + patience
    while identity_of(prediction.directory, parts.KIND) != prediction.identity:
        if time.monotonic() > until:
            raise UserError(f"{prediction.directory} has not come for {patience:.0f} s: do all processes see it?")
        time.sleep(_POLL)


def compute_parts(
    prediction: Prediction, model: TrainedModel, rank: int, ranks: int, advance: Callable[[int], object]
) -> None:
    """Compute this process's parts that are not there yet.

    Args:
        prediction: what is wanted.
        model: computes it.
        rank: of this process.
        ranks: how many there are.
        advance: told how many sequences are done.

    Raises:
        UserError: for a sequence that is none, or too long where that is an error.
    """
    for number, (first, last) in enumerate(prediction.parts()):
        if number % ranks == rank:
            if parts.length_of(prediction.file(number), prediction.digest) is not None:
                advance(last - first)
            else:
                _compute_part(prediction, model, number, range(first, last), advance)


def _compute_part(
    prediction: Prediction, model: TrainedModel, number: int, which: range, advance: Callable[[int], object]
) -> None:
    data = prediction.data
    records = list(prediction.records.read(which.start, which.stop))
    names = [f"{record.id} (record {number:,})" for number, record in zip(which, records, strict=True)]
    vocabulary = model.network.vocabulary
    ids = [token_ids(vocabulary, record.text, name) for record, name in zip(records, names, strict=True)]
    fitted = fit(ids, names, room(model.network), data.long_sequences)
    if fitted.long and data.long_sequences != "error":
        done = {"truncate": "cut", "split": "read in pieces", "drop": "left out"}[data.long_sequences]
        more = f" and {len(fitted.long) - 1} more" if len(fitted.long) > 1 else ""
        log.warning("%s%s: more than %d tokens, %s", names[fitted.long[0]], more, room(model.network), done)
    limits = Limits(data.tokens_per_batch, data.batch_size)
    texts = ways(prediction.task)
    rest = [name for name in prediction.outputs if name not in WRITTEN]
    computed = list(model.compute(fitted.pieces, rest, limits, silent if texts else advance))
    columns = {
        name: np.concatenate([each[name] for each in computed]) if computed else np.zeros((0, 1), np.float32)
        for name in rest
    }
    columns, tokens = join(columns, fitted)
    numbers = which.start + np.array(fitted.kept, np.int64)
    molecules: dict[str, np.ndarray] = {}
    for name, way in texts.items():
        last = len(molecules) == len(texts) - 1
        found = as_bytes(written(model, fitted.pieces, way, numbers, limits, advance if last else silent))
        molecules[name] = found[:, 0] if name == "reconstruction" else found
    advance(len(which) - len(fitted.pieces))
    parts.write(
        prediction.file(number), {**columns, **molecules, "tokens": tokens, "numbers": numbers}, prediction.digest
    )


def await_parts(prediction: Prediction, patience: float, still_there: Callable[[], object]) -> None:
    """Wait for the parts of the other processes.

    Args:
        prediction: what is wanted.
        patience: seconds without anything new, after which they are given up.
        still_there: called again and again; raises when one has failed.

    Raises:
        UserError: when no new part comes.
    """
    missing, since = len(prediction.parts()), time.monotonic()
    while True:
        still_there()
        left = sum(not prediction.file(number).exists() for number in range(len(prediction.parts())))
        if not left:
            return
        if left < missing:
            missing, since = left, time.monotonic()
        if time.monotonic() - since > patience:
            raise UserError(
                f"{left} parts have not come for {patience:.0f} s (trainer.rank_timeout): see what the other "
                "processes say; all must see the same directory. The same command goes on from what is there"
            )
        time.sleep(_POLL)


def abandon(prediction: Prediction) -> None:
    """Leave no directory behind in which nothing has been computed."""
    with suppress(UserError, OSError):
        if not list(prediction.directory.glob("part-*")):
            remove_owned(prediction.directory, parts.KIND, parts.NAMES)


def finish(prediction: Prediction) -> list[str]:
    """Put all parts into the output, and remove them; what there is to tell of it, in lines.

    Raises:
        UserError: when a part is damaged, the output has appeared meanwhile, or no sequence is left.
        OSError: when the output cannot be written; the parts stay.
    """
    files = [prediction.file(number) for number in range(len(prediction.parts()))]
    lengths = {file: parts.length_of(file, prediction.digest) for file in files}
    if damaged := [file for file in files if lengths[file] is None]:
        raise UserError(f"{damaged[0]} is damaged: run the command again, which computes it again")
    results = Results([file for file in files if lengths[file]], prediction.records, prediction.outputs)
    if not results.files:
        raise UserError("every sequence was left out: set model.data.long_sequences to truncate or split")
    lines = [f"{len(results.tokens):,} sequences: {prediction.output}"]
    lines += [tally(name, results.texts(name)) for name in prediction.outputs if name in WRITTEN]
    _refuse_existing(prediction)
    write(prediction.output, prediction.kind, results, prediction.directory)
    try:
        remove_owned(prediction.directory, parts.KIND, parts.NAMES)
    except (UserError, OSError) as error:
        log.warning("%s is not needed any more and could not be deleted: %s", prediction.directory, error)
    return lines

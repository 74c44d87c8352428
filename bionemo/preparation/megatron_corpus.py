# SPDX-License-Identifier: Apache-2.0
"""Text to Megatron's indexed data sets: `.jsonl` files, plain or gzipped, to `<output>.bin` and `<output>.idx`.

Worker processes tokenise, without Megatron or torch; this process writes what they make in the order of the files, so
the result does not depend on their number.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from bionemo.common.errors import UserError
from bionemo.common.files import create_owned, identity_of, remove_owned, sync
from bionemo.common.regular import open_regular
from bionemo.config.schema.preparation import TextJob
from bionemo.data.text.jsonl import Lines, TextRules
from bionemo.preparation.inputs import is_gzipped, whole_lines
from bionemo.preparation.manifest import Tally
from bionemo.preparation.pool import in_order
from bionemo.preparation.progress import progress
from bionemo.preparation.writer import sole_preparer, told
from bionemo.tokenizers.gpt2 import read_gpt2

log = logging.getLogger("bionemo.preparation.text")  # what preparations tell goes to standard output
_KIND, _MAGIC = "indexed data set", b"MMIDIDX\x00\x00"
_PIECE = 1 << 20  # bytes of text: half a second of a tokenizer


def prepare(job: TextJob) -> None:
    """Tokenise documents.

    The two files are written to `.<name>.preparing` and get their names when they are complete.

    Raises:
        UserError: for files that cannot be read, a document that a policy calls an error, an output that is there
            already, and a source without a document.
    """
    if not Path(job.output).name:
        raise UserError(f"output={job.output}: give a directory and a name, as in data/mine/text")
    sources = [job.source] if isinstance(job.source, str) else job.source
    for source in sources:
        is_gzipped(Path(source))  # that a file cannot be read is told before others are
    read_gpt2(job.vocab_file, job.merge_file)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes are enough; they need no threads beside them
    output = Path(job.output)
    _refuse_to_overwrite(job)
    with told(output.parent), sole_preparer(output.parent, f".{output.name}.lock"):
        stage = output.with_name(f".{output.name}.preparing")
        _recover(stage, output)
        _refuse_to_overwrite(job)  # another process may have prepared it meanwhile
        create_owned(stage, _KIND)
        try:
            _write(job, sources, stage / "bin", stage / "idx")
            for kind in ("bin", "idx"):
                sync(stage / kind)
            sync(stage)
            _move(stage, output)
        finally:
            _recover(stage, output)
    log.info("prepared: %s.bin, %s.idx", output, output)


def _move(stage: Path, output: Path) -> None:
    """Move both files to their places, the index last: without it the data set is not complete."""
    if (index := _file(output, "idx")).exists():
        os.replace(index, stage / "former.idx")
    os.replace(stage / "bin", _file(output, "bin"))
    os.replace(stage / "idx", index)
    sync(output.parent)


def _recover(stage: Path, output: Path) -> None:
    """Finish what `_move` has begun, or undo it while the former data file is there, and remove the stage."""
    if identity_of(stage, _KIND) is None:
        return
    index = _file(output, "idx")
    if not os.path.lexists(index):
        rest = "former.idx" if (stage / "bin").exists() else "idx"
        if (stage / rest).is_file() and not (stage / rest).is_symlink() and _file(output, "bin").exists():
            os.replace(stage / rest, index)
    remove_owned(stage, _KIND, r"bin|idx|former\.idx")


def _file(output: Path, kind: str) -> Path:
    return output.with_name(f"{output.name}.{kind}")


def _refuse_to_overwrite(job: TextJob) -> None:
    """See that nothing is replaced unless that is asked for, and nothing but an indexed data set ever is."""
    output = Path(job.output)
    stage = output.with_name(f".{output.name}.preparing")
    for kind in ("bin", "idx"):
        if not os.path.lexists(there := _file(output, kind)):
            continue
        if not job.force and identity_of(stage, _KIND) is None:  # else it is recovered first
            raise UserError(f"{there} is there already: choose another output, or set force=True to replace it")
        if job.force and identity_of(stage, _KIND) is None and not _is_indexed(output):
            raise UserError(f"{there} does not belong to an indexed data set: move it away, or choose another output")


def _is_indexed(output: Path) -> bool:
    try:
        with open_regular(_file(output, "idx")) as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except (OSError, ValueError):
        return False


def _write(job: TextJob, sources: Sequence[str], data: Path, index: Path) -> None:
    """Write both files, and tell what became of the documents."""
    tokenizer = read_gpt2(job.vocab_file, job.merge_file)
    rules = TextRules(job.vocab_file, job.merge_file, job.json_key, job.append_eod, job.on_empty, job.on_invalid)
    dropped: Counter[str] = Counter()
    tally, tokens, begun = Tally([job.output]), 0, time.monotonic()
    builder = IndexedDatasetBuilder(str(data), DType.optimal_dtype(tokenizer.vocab_size))
    with (
        closing(builder.data_file),
        progress("tokenising", sum(Path(source).stat().st_size for source in sources)) as advance,
        closing(in_order(rules.tokenise, _lines(sources), job.num_preprocess_workers)) as results,
    ):
        for documents in results:
            begin = 0
            for length in documents.tokens.lengths.tolist():
                builder.add_document(documents.tokens.ids[begin : begin + length], [length])
                begin += length
            tally.read += documents.read
            tally.written += len(documents.tokens.lengths)
            tokens += begin
            dropped += documents.dropped
            advance(documents.size)
        tally.dropped = dict(sorted(dropped.items()))
        left_out = "".join(f", {count:,} dropped ({reason})" for reason, count in tally.dropped.items())
        if not tally.written:
            raise UserError(f"{', '.join(sources)}: {tally.read:,} documents read{left_out}, none is left: give text")
        builder.finalize(str(index))
    for problem in tally.problems:
        raise AssertionError(problem)
    speed = tokens / (time.monotonic() - begun)
    log.info("%s: %s documents read, %s written with %s tokens%s; %s tokens/s", ", ".join(sources), f"{tally.read:,}",
             f"{tally.written:,}", f"{tokens:,}", left_out, f"{speed:,.0f}")  # fmt: skip


def _lines(sources: Sequence[str]) -> Iterator[Lines]:
    for source in sources:
        first = 1
        for data, size in whole_lines(Path(source), _PIECE):
            yield Lines(source, first, data, size)
            first += data.count(b"\n")

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

from bionemo.common.files import sync
from bionemo.config.schema.preparation import TextJob
from bionemo.data.text.jsonl import Lines, TextRules
from bionemo.errors import UserError
from bionemo.preparation.inputs import is_gzipped, whole_lines
from bionemo.preparation.manifest import Tally
from bionemo.preparation.pool import in_order
from bionemo.preparation.progress import progress
from bionemo.preparation.writer import sole_preparer, told
from bionemo.tokenizers.gpt2 import read_gpt2

log = logging.getLogger("bionemo.preparation.text")  # what preparations tell goes to standard output
_PIECE = 1 << 20  # bytes of text: half a second of a tokenizer


def prepare(job: TextJob) -> None:
    """Tokenise documents.

    The two files appear under their names when they are whole, the index last: without it the data is not taken.

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
        _refuse_to_overwrite(job)  # another process may have prepared it meanwhile
        drafts = {kind: output.with_name(f".{output.name}.preparing.{kind}") for kind in ("bin", "idx")}
        try:
            _write(job, sources, drafts["bin"], drafts["idx"])
            _file(output, "idx").unlink(missing_ok=True)  # until the end there is none, or the former's would be taken
            for kind, draft in drafts.items():
                sync(draft)
                os.replace(draft, _file(output, kind))
            sync(output.parent)
        finally:
            for draft in drafts.values():
                draft.unlink(missing_ok=True)
    log.info("prepared: %s.bin, %s.idx", output, output)


def _file(output: Path, kind: str) -> Path:
    return output.with_name(f"{output.name}.{kind}")


def _refuse_to_overwrite(job: TextJob) -> None:
    for kind in ("bin", "idx"):
        if (there := _file(Path(job.output), kind)).exists() and not job.force:
            raise UserError(f"{there} is there already: choose another output, or set force=True to replace it")


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

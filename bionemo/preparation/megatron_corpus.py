# SPDX-License-Identifier: Apache-2.0
"""Prepare text as a Megatron indexed dataset: `.jsonl` files, plain or gzipped, to `<output>.bin` and `<output>.idx`.

Worker processes tokenize without Megatron or torch. This process writes the results in the order of the files, so the
output does not depend on the number of workers.
"""

import logging
import os
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from bionemo.common.errors import UserError
from bionemo.common.files import create_owned, identity_of, remove_owned, sync
from bionemo.common.lock import run_lock
from bionemo.common.regular import open_regular
from bionemo.config.schema.preparation import TextJob
from bionemo.preparation.inputs import is_gzipped, read_line_blocks
from bionemo.preparation.jsonl import DocumentTokenizer
from bionemo.preparation.manifest import RecordCounts
from bionemo.preparation.pool import map_ordered
from bionemo.preparation.progress import progress
from bionemo.preparation.staged_output import translate_os_errors
from bionemo.tokenizers.gpt2 import read_gpt2

with warnings.catch_warnings():
    # On import Megatron-Core warns about each optional accelerator library that is not installed.
    warnings.simplefilter("ignore")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns of CUDA without a GPU
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

log = logging.getLogger("bionemo.preparation.text")  # logged to standard output, as for other preparations
_MARKER_KIND, _MAGIC = "indexed data set", b"MMIDIDX\x00\x00"
_BLOCK_BYTES = 1 << 20  # half a second of a tokenizer


def prepare(job: TextJob) -> None:
    """Tokenize documents.

    Both files are written to the staging directory `.<name>.preparing` and moved into place when complete.

    Raises:
        UserError: if a file cannot be read, a document is invalid and its policy is `error`, the output exists, or
            there are no documents.
    """
    output = Path(job.output)
    if not output.name:
        raise UserError(f"output={job.output}: give a directory and a name, as in data/mine/text")
    sources = [job.source] if isinstance(job.source, str) else job.source
    for source in sources:
        is_gzipped(Path(source))  # reports unreadable files before any other is tokenized
    read_gpt2(job.vocab_file, job.merge_file)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the worker processes need no additional threads
    _check_overwrite(job)
    with translate_os_errors(output.parent), run_lock(output.parent, f".{output.name}.lock", wait=True):
        staging = _staging_directory(output)
        _recover(staging, output)
        _check_overwrite(job)  # another process may have prepared it meanwhile
        create_owned(staging, _MARKER_KIND)
        try:
            _write(job, sources, staging / "bin", staging / "idx")
            for path in (staging / "bin", staging / "idx", staging):
                sync(path)
            _move(staging, output)
        finally:
            _recover(staging, output)
    log.info("prepared: %s.bin, %s.idx", output, output)


def _staging_directory(output: Path) -> Path:
    return output.with_name(f".{output.name}.preparing")


def _move(staging: Path, output: Path) -> None:
    """Move both files into place, the index last: without it the dataset is incomplete."""
    if (index := _output_file(output, "idx")).exists():
        os.replace(index, staging / "former.idx")
    os.replace(staging / "bin", _output_file(output, "bin"))
    os.replace(staging / "idx", index)
    sync(output.parent)


def _recover(staging: Path, output: Path) -> None:
    """Complete an interrupted `_move`, or undo it if the old data file remains; remove the staging directory."""
    if identity_of(staging, _MARKER_KIND) is None:
        return
    index = _output_file(output, "idx")
    if not os.path.lexists(index):
        restored = staging / ("former.idx" if (staging / "bin").exists() else "idx")
        if restored.is_file() and not restored.is_symlink() and _output_file(output, "bin").exists():
            os.replace(restored, index)
    remove_owned(staging, _MARKER_KIND, r"bin|idx|former\.idx")


def _output_file(output: Path, suffix: str) -> Path:
    return output.with_name(f"{output.name}.{suffix}")


def _check_overwrite(job: TextJob) -> None:
    """Check that existing files are replaced only with `force`, and only if they are an indexed dataset."""
    output = Path(job.output)
    if identity_of(_staging_directory(output), _MARKER_KIND) is not None:
        return  # an interrupted preparation: it is recovered first
    for suffix in ("bin", "idx"):
        path = _output_file(output, suffix)
        if not os.path.lexists(path):
            continue
        if not job.force:
            raise UserError(f"{path} exists already: choose another output, or set force=True to replace it")
        if not _is_indexed(output):
            raise UserError(f"{path} does not belong to an indexed data set: move it away, or choose another output")


def _is_indexed(output: Path) -> bool:
    try:
        with open_regular(_output_file(output, "idx")) as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except (OSError, ValueError):
        return False


def _write(job: TextJob, sources: Sequence[str], data: Path, index: Path) -> None:
    """Write both files and log the number of documents."""
    vocabulary_size = read_gpt2(job.vocab_file, job.merge_file).vocab_size
    tokenizer = DocumentTokenizer(
        job.vocab_file, job.merge_file, job.json_key, job.append_eod, job.on_empty, job.on_invalid
    )
    dropped: Counter[str] = Counter()
    counts, num_tokens, begin_time = RecordCounts([job.output]), 0, time.monotonic()
    blocks = (block for source in sources for block in read_line_blocks(Path(source), source, _BLOCK_BYTES))
    builder = IndexedDatasetBuilder(str(data), DType.optimal_dtype(vocabulary_size))
    with (
        closing(builder.data_file),
        progress("tokenizing", sum(Path(source).stat().st_size for source in sources)) as advance,
        closing(map_ordered(tokenizer.tokenize, blocks, job.num_preprocess_workers)) as results,
    ):
        for documents in results:
            begin = 0
            for length in documents.lengths:
                builder.add_document(documents.ids[begin : begin + length], [length])
                begin += length
            counts.read += documents.read
            counts.written += len(documents.lengths)
            num_tokens += begin
            dropped += documents.dropped
            advance(documents.size)
        counts.dropped = dict(sorted(dropped.items()))
        dropped_text = "".join(f", {count:,} dropped ({reason})" for reason, count in counts.dropped.items())
        if not counts.written:
            raise UserError(
                f"{', '.join(sources)}: {counts.read:,} documents read{dropped_text}, no documents remain: add some"
            )
        builder.finalize(str(index))
    for problem in counts.inconsistencies():
        raise AssertionError(problem)
    speed = num_tokens / (time.monotonic() - begin_time)
    log.info(
        "%s: %s documents read, %s written with %s tokens%s; %s tokens/s", ", ".join(sources), f"{counts.read:,}",
        f"{counts.written:,}", f"{num_tokens:,}", dropped_text, f"{speed:,.0f}",
    )  # fmt: skip

# SPDX-License-Identifier: Apache-2.0
"""Prepare text as a Megatron indexed dataset: `.jsonl` files, plain or gzipped, to `<output>.bin` and `<output>.idx`.

Worker processes tokenize without Megatron or torch. This process writes the results in the order of the files, so the
output does not depend on the number of workers.
"""

import logging
import os
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from bionemo.common.errors import UserError
from bionemo.common.files import sync
from bionemo.common.lock import run_lock
from bionemo.common.progress import progress
from bionemo.config.schema.preparation import TextJob
from bionemo.preparation.inputs import is_gzipped, read_line_blocks
from bionemo.preparation.jsonl import DocumentTokenizer
from bionemo.preparation.manifest import RecordCounts
from bionemo.preparation.pool import map_ordered
from bionemo.preparation.staged_output import translate_os_errors
from bionemo.tokenizers.gpt2 import read_gpt2

with warnings.catch_warnings():
    # On import Megatron-Core warns about each optional accelerator library that is not installed.
    warnings.simplefilter("ignore")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns of CUDA without a GPU
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

log = logging.getLogger("bionemo.preparation.text")  # logged to standard output, as for other preparations
_MAGIC = b"MMIDIDX\x00\x00"
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
    staging = output.with_name(f".{output.name}.preparing")
    data, index = (output.with_name(f"{output.name}.{suffix}") for suffix in ("bin", "idx"))
    _check_overwrite(job, data, index, staging)
    with translate_os_errors(output.parent), run_lock(output.parent, f".{output.name}.lock", wait=True):
        _check_overwrite(job, data, index, staging)  # another process may have prepared it meanwhile
        shutil.rmtree(staging, ignore_errors=True)  # of an interrupted preparation
        staging.mkdir()
        try:
            _write(job, sources, staging / "bin", staging / "idx")
        except BaseException:
            shutil.rmtree(staging)
            raise
        for path in (staging / "bin", staging / "idx", staging):
            sync(path)
        index.unlink(missing_ok=True)  # without it, the data set is incomplete until both files have been moved
        os.replace(staging / "bin", data)
        os.replace(staging / "idx", index)
        sync(output.parent)
        staging.rmdir()
    log.info("prepared: %s.bin, %s.idx", output, output)


def _check_overwrite(job: TextJob, data: Path, index: Path, staging: Path) -> None:
    """Check that existing files are replaced only with `force`, and only if they are an indexed dataset."""
    if (staging / "idx").exists() and not index.exists():
        return  # a preparation was interrupted while it moved its files
    for path in (data, index):
        if not path.exists():
            continue
        if not job.force:
            raise UserError(f"{path} exists already: choose another output, or set force=True to replace it")
        if not index.is_file() or not _starts_with_magic(index):
            raise UserError(f"{path} does not belong to an indexed data set: move it away, or choose another output")


def _starts_with_magic(index: Path) -> bool:
    with index.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


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
        closing(map_ordered(tokenizer.tokenize, blocks, job)) as results,
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

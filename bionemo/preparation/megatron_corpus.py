# SPDX-License-Identifier: Apache-2.0
"""Prepare text as a Megatron indexed dataset: `.jsonl` files, plain or gzipped, to `<output>.bin` and `<output>.idx`.

Worker processes tokenize without Megatron or torch. This process writes the results in the order of the files, so the
output does not depend on the number of workers.
"""

import json
import logging
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError
from bionemo.common.files import sync
from bionemo.common.lock import run_lock
from bionemo.common.progress import progress
from bionemo.config.schema.preparation import TextJob
from bionemo.data.shards.formats import BYTE_ORDER_MARK
from bionemo.preparation.inputs import LineBlock, is_gzipped, read_head, read_line_blocks
from bionemo.preparation.manifest import RecordCounts
from bionemo.preparation.pool import map_ordered
from bionemo.preparation.staged_output import translate_os_errors
from bionemo.tokenizers.gpt2 import read_gpt2

log = logging.getLogger("bionemo.preparation.text")  # logged to standard output, as for other preparations
_MAGIC = b"MMIDIDX\x00\x00"
_BLOCK_BYTES = 1 << 20  # half a second of a tokenizer


class TokenizedDocuments(NamedTuple):
    """Result of tokenizing a block of lines."""

    ids: NDArray[np.integer[Any]]  # [n] concatenated tokens of the documents that are kept
    lengths: list[int]  # number of tokens of each
    dropped: Counter[str]  # number of dropped documents by reason
    size: int  # `LineBlock.size`


def tokenize(job: TextJob, lines: LineBlock) -> TokenizedDocuments:
    """Tokenize the documents of a block of lines with GPT-2's tokenizer; skip blank lines.

    Raises:
        UserError: if a policy is "error" and rejects a document.
    """
    tokenizer = read_gpt2(job.vocab_file, job.merge_file)
    dropped: Counter[str] = Counter()
    data = lines.data.removeprefix(BYTE_ORDER_MARK) if lines.first_line == 1 else lines.data
    texts, numbers = [], []
    for number, line in enumerate(data.split(b"\n"), lines.first_line):
        if not line.strip():
            continue
        try:
            texts.append(_parse(line, job.json_key))
            numbers.append(number)
        except ValueError as problem:
            if job.on_invalid == "error":
                raise UserError(
                    f"{lines.display_path}:{number}: {problem}: correct it, or set on_invalid=skip"
                ) from problem
            dropped["invalid"] += 1
    end = np.array([tokenizer.eod_id] if job.append_eod else [], tokenizer.dtype)
    kept = []
    for number, ids in zip(numbers, tokenizer.encode_all(texts), strict=True):
        if len(ids):
            kept.append(np.append(ids, end))
        elif job.on_empty == "skip":
            dropped["empty"] += 1
        else:
            raise UserError(f"{lines.display_path}:{number}: a document without text: remove it, or set on_empty=skip")
    ids, lengths = np.concatenate([end[:0], *kept]), [len(each) for each in kept]
    return TokenizedDocuments(ids, lengths, dropped, lines.size)


def _parse(line: bytes, key: str) -> str:
    """Return the text of a line.

    Raises:
        ValueError: if there is none; states the problem.
    """
    try:
        text = json.loads(line.decode())[key]
        text.encode()
    except UnicodeDecodeError:
        raise ValueError("text that is not UTF-8") from None
    except UnicodeEncodeError:
        raise ValueError(f"the {key!r} contains an unpaired surrogate") from None
    except (ValueError, RecursionError):
        raise ValueError("a line that is not JSON") from None
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"a line that is not a JSON object with a string {key!r}") from None
    return str(text)


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
    with translate_os_errors(output.parent), run_lock(output.parent, f".{output.name}.lock", wait=True):
        _check_overwrite(job, data, index, staging)
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
    existing = [path for path in (data, index) if path.exists()]
    if existing and not job.force:
        raise UserError(f"{existing[0]} exists already: choose another output, or set force=True to replace it")
    if existing and not (index.is_file() and read_head(index, len(_MAGIC)) == _MAGIC):
        raise UserError(
            f"{existing[0]} does not belong to an indexed data set: move it away, or choose another output"
        )


def _write(job: TextJob, sources: Sequence[str], data: Path, index: Path) -> None:
    """Write both files and log the number of documents."""
    with warnings.catch_warnings():
        # On import Megatron-Core warns about each optional accelerator library that is not installed.
        warnings.simplefilter("ignore")
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns of CUDA without a GPU
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    dtype = DType.optimal_dtype(read_gpt2(job.vocab_file, job.merge_file).vocab_size)
    counts, num_tokens = RecordCounts([job.output]), 0
    blocks = (block for source in sources for block in read_line_blocks(Path(source), source, _BLOCK_BYTES))
    builder = IndexedDatasetBuilder(str(data), dtype)
    with (
        closing(builder.data_file),
        progress("tokenizing", sum(Path(source).stat().st_size for source in sources)) as advance,
        closing(map_ordered(partial(tokenize, job), blocks, job)) as results,
    ):
        for documents in results:
            for length, end in zip(documents.lengths, np.cumsum(documents.lengths), strict=True):
                builder.add_document(documents.ids[end - length : end], [length])
            for reason, count in documents.dropped.items():
                counts.drop(reason, count)
            counts.written += len(documents.lengths)
            num_tokens += len(documents.ids)
            advance(documents.size)
        counts.read = counts.written + sum(counts.dropped.values())
        dropped_text = "".join(f", {count:,} dropped ({reason})" for reason, count in sorted(counts.dropped.items()))
        if not counts.written:
            raise UserError(
                f"{', '.join(sources)}: {counts.read:,} documents read{dropped_text}, no documents remain: add some"
            )
        builder.finalize(str(index))
    log.info(
        "%s: %s documents read, %s written with %s tokens%s", ", ".join(sources), f"{counts.read:,}",
        f"{counts.written:,}", f"{num_tokens:,}", dropped_text,
    )  # fmt: skip

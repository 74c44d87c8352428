# SPDX-License-Identifier: Apache-2.0
"""A compressed file is refused wherever sequences are read, with a command that decompresses it."""

import bz2
import gzip
import lzma
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bionemo.analysis.files import is_fasta, read_fasta
from bionemo.common.errors import UserError
from bionemo.data.shards.compressed import refuse_compressed
from bionemo.data.shards.formats import Fasta
from bionemo.data.shards.ranges import shard_paths
from bionemo.data.shards.records import TextRecords
from bionemo.data.table import read_table

CONTENT = b">a\nMKV\n>b\nLL\n"


def blocks(content: bytes) -> bytes:
    """Compress as bgzip does: one gzip member for each block."""
    return b"".join(gzip.compress(content[first : first + 5]) for first in range(0, len(content), 5))


@pytest.mark.parametrize(
    ("name", "compress"),
    [
        ("x.fasta.gz", gzip.compress), ("it's x.fa.gz", gzip.compress), ("x.faa.bgz", blocks), ("x.fas.gz", blocks),
        ("x.fasta", gzip.compress), ("x.fasta.bz2", bz2.compress), ("x.fa.xz", lzma.compress),
    ],
)  # fmt: skip
def test_the_advice_works(name: str, compress: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(compress(CONTENT))
    with pytest.raises(UserError) as error:
        refuse_compressed(path)
    match = re.fullmatch(
        r"(.*) is compressed, and records are read in place: run `(.*)` and give (.*)", str(error.value)
    )
    assert match and match[1] == str(path)
    subprocess.run(match[2], shell=True, check=True)
    plain = Path(match[3])
    assert plain.read_bytes() == CONTENT
    assert path.exists()
    assert [each["sequence"] for each in read_fasta(plain)] == ["MKV", "LL"]


@pytest.mark.parametrize(
    "read",
    [
        lambda path: TextRecords([path], Fasta()), read_fasta, is_fasta, read_table,
        lambda path: shard_paths(path.parent.parent, "train", path.name, ".fasta"),
        lambda path: shard_paths("/elsewhere", "train", f"{path.parent}/x.fasta_OP_.gz_CL_", ".csv"),
    ],
)  # fmt: skip
def test_every_reader_refuses_them(read: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "train" / "x.fasta.gz"
    path.parent.mkdir()
    path.write_bytes(gzip.compress(CONTENT))
    with pytest.raises(UserError, match=re.escape(f"run `gunzip < {path} > {path.with_suffix('')}` and give")):
        read(path)


def test_a_plain_file_with_the_name_of_a_compressed_one_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.fasta.gz"
    path.write_bytes(CONTENT)
    assert [each["sequence"] for each in read_fasta(path)] == ["MKV", "LL"]

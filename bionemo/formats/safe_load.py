# SPDX-License-Identifier: Apache-2.0
"""Read the files of models without running code in them: `.nemo` archives, without extracting them, and pickles.

PyYAML reads only plain values, and `torch.load` with `weights_only=True` only tensors.
"""

import gzip
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile
from typing import IO, Any, ClassVar

import torch
import yaml
from torch import Tensor

from bionemo.common.errors import UserError
from bionemo.common.regular import open_regular
from bionemo.formats.shape_check import quote_error

_MAX_YAML = 1 << 17  # bytes; BioNeMo v1 needs about 10 KB
# gzip compresses weights to at least half of their size, but a decompression bomb to a thousandth.
_MAX_EXPANSION = 20
_MIN_EXPANDED = 16 << 20  # bytes to which every gzipped archive may expand


@contextmanager
def open_tar(path: Path) -> Iterator[dict[str, IO[bytes]]]:
    """Open a tar, gzipped or not, and yield its regular files by name, without a leading "./".

    A gzipped archive is first expanded into an unnamed temporary file, to at most 20 times its size (or 16 MiB).

    Raises:
        UserError: if the archive is damaged.
        OSError: if it cannot be read, or the disk is full.
    """
    if not path.is_file():
        raise UserError("the file does not exist")
    with path.open("rb") as file, TemporaryFile() as plain:
        try:
            is_compressed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            if is_compressed:
                _gunzip(file, plain, max(_MIN_EXPANDED, _MAX_EXPANSION * path.stat().st_size))
            with tarfile.open(fileobj=plain if is_compressed else file, mode="r:") as tar:
                files = ((str(PurePosixPath(each.name)), tar.extractfile(each)) for each in tar if each.isreg())
                yield {name: member for name, member in files if member is not None}
        except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UserError(f"it is damaged, or not a tar ({quote_error(error)})") from error


def _gunzip(file: IO[bytes], plain: IO[bytes], limit: int) -> None:
    with gzip.GzipFile(fileobj=file) as stream:
        while chunk := stream.read(1 << 20):
            plain.write(chunk)
            if plain.tell() > limit:
                raise UserError(f"it expands to more than {_MAX_EXPANSION} times its size")
    plain.seek(0)


class _PlainLoader(yaml.SafeLoader):
    """YAML without tags, and without aliases, which could expand it; dates stay text."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        letter: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) is not None:
            raise yaml.YAMLError("tags and aliases are not supported")
        return super().compose_node(parent, index)


def load_settings(file: IO[bytes]) -> dict[str, Any]:
    """Read a YAML mapping of plain values; interpolations are not resolved.

    Raises:
        UserError: if it is too long, not YAML, or not a mapping.
    """
    text = file.read(_MAX_YAML + 1)
    if len(text) > _MAX_YAML:
        raise UserError("its configuration is too long")
    try:
        settings = yaml.load(text, _PlainLoader)
    except Exception as error:  # the parser raises various types
        raise UserError(f"its configuration is not plain YAML ({quote_error(error)})") from error
    if not (isinstance(settings, dict) and all(isinstance(key, str) for key in settings)):
        raise UserError("its configuration is not a mapping of keys to values")
    return settings


def load_saved(file: IO[bytes]) -> Any:
    """Read what torch.save wrote: tensors and plain values.

    Raises:
        UserError: if it contains anything else, or is damaged.
    """
    return _load(file, file)


def load_tensors(file: IO[bytes]) -> dict[str, Tensor]:
    """Read a state dict that torch.save wrote, at top level or under "state_dict"; entries that are None are ignored.

    Raises:
        UserError: if it contains anything but tensors, or is damaged.
    """
    state = load_saved(file)
    return check_tensors(state.get("state_dict", state) if isinstance(state, dict) else state)


def load_file(path: Path, classes: Sequence[type] = ()) -> Any:
    """Read what torch.save wrote, tensors mapped into memory if the file is a zip archive.

    Args:
        path: the file.
        classes: classes that it may contain, besides those that torch allows.

    Raises:
        UserError: if it contains other objects, or is damaged.
    """
    with open_regular(path) as file, torch.serialization.safe_globals(list(classes)):
        return _load(file, path)


def check_tensors(state: object) -> dict[str, Tensor]:
    """Return the entries of a state dict that are not None.

    Raises:
        UserError: if it is not a mapping of names to ordinary tensors.
    """
    if not isinstance(state, dict):
        raise UserError("its weights are not a state dict")
    tensors = {name: value for name, value in state.items() if value is not None}
    for name, value in tensors.items():
        if not (isinstance(value, Tensor) and value.layout is torch.strided and value.device.type == "cpu"):
            raise UserError(f"{str(name)[:80]!r} in its weights is not an ordinary tensor")
    return {str(name): value.detach() for name, value in tensors.items()}


def _load(file: IO[bytes], source: IO[bytes] | Path) -> Any:
    """Load `source`, which is the file or its path; only a path can be mapped into memory."""
    name = f"weights in {source.name}" if isinstance(source, Path) else "weights"
    try:
        is_zip = zipfile.is_zipfile(file)  # otherwise the format of torch before 1.6
        if is_zip or not isinstance(source, Path):
            with zipfile.ZipFile(file) as archive:
                if damaged := archive.testzip():  # torch.load does not compare the checksums
                    raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
        file.seek(0)
        return torch.load(source, map_location="cpu", weights_only=True, mmap=is_zip and isinstance(source, Path))
    except pickle.UnpicklingError as error:
        raise UserError(f"its {name} contain other objects than tensors, which could run code") from error
    except Exception as error:  # zipfile and torch raise various types
        raise UserError(f"its {name} cannot be read ({quote_error(error)})") from error

# SPDX-License-Identifier: Apache-2.0
"""Read settings and tensors from untrusted bytes without running or importing code that they name.

A file written by torch.save is a zip archive of one pickle and the raw storages. This module parses it once, with
zipfile and a restricted unpickler, and builds the tensors from the records that it has checked. torch.load is not
used: its zip reader may find another archive in the same bytes (two zip64 directories), and `weights_only=True` also
calls functions that other packages add to torch's list of safe globals.
"""

import io
import math
import pickle
import pickletools
import re
import zipfile
from collections.abc import Mapping
from typing import IO, Any, ClassVar, cast

import torch
import yaml
from torch import Tensor

from bionemo.common.errors import UserError
from bionemo.interop.safe_tar import Member
from bionemo.interop.shape_check import quote_error

_MAX_YAML, _MAX_PICKLE = 1 << 17, 4 << 20  # bytes; BioNeMo v1 needs about 10 KB, and 200 KB for 600 tensors
_CHUNK = 1 << 20  # bytes of a storage that are read at once
_MAX_TUPLES, _MAX_MEMO = 20_000, 1 << 20  # nested tuples are hashed on the C stack; the memo is an array
_RECORD = re.compile(
    r"[^/]+/(data\.pkl|data/\d+|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id)"
)
_STORAGES = {
    "FloatStorage": torch.float32, "HalfStorage": torch.float16, "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip
_GLOBALS = {
    "collections.OrderedDict",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
    *(f"torch.{name}" for name in _STORAGES),
}
# Opcodes of pickled tensors, dicts and numbers with protocol 2, which torch.save uses.
_OPCODES = {
    "PROTO", "STOP", "MARK", "GLOBAL", "REDUCE", "BUILD", "BINPERSID", "BINPUT", "LONG_BINPUT", "BINGET",
    "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE",
    "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM",
    "SETITEMS",
}  # fmt: skip


class _PlainLoader(yaml.SafeLoader):
    """YAML without tags, which could create objects, and aliases, which could expand it; dates stay text."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        letter: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) is not None:
            raise yaml.YAMLError("tags and aliases are not supported")
        return super().compose_node(parent, index)


def load_settings(member: Member) -> dict[str, Any]:
    """Read a YAML mapping of plain values; interpolations are not resolved.

    Raises:
        UserError: if it is too long, not a mapping, or has other values.
    """
    if member.size > _MAX_YAML:
        raise UserError("its configuration is too long")
    try:
        settings = yaml.load(member.read(), _PlainLoader)
    except Exception as error:  # the parser raises various types
        raise UserError(f"its configuration is not plain YAML ({quote_error(error)})") from error
    if not (isinstance(settings, dict) and all(isinstance(key, str) for key in settings)):
        raise UserError("its configuration is not a mapping of keys to values")
    return settings


def load_tensors(member: Member) -> dict[str, Tensor]:
    """Read a state dict that torch.save wrote, at top level or under "state_dict"; entries that are None are ignored.

    Raises:
        UserError: if it contains anything but contiguous tensors, or is damaged.
    """
    try:
        state = _load(member)
    except UserError:
        raise
    except Exception as error:  # zipfile, pickle and torch raise various types
        raise UserError(f"its weights cannot be read ({quote_error(error)})") from error
    state = state.get("state_dict", state) if isinstance(state, dict) else state
    if not isinstance(state, dict):
        raise UserError("its weights are not a state dict")
    tensors = {name: value for name, value in state.items() if value is not None}
    for name, value in tensors.items():
        if not isinstance(name, str):
            raise UserError("its weights have an entry whose name is not text")
        if not isinstance(value, Tensor):
            raise UserError(f"{name[:80]!r} in its weights is not a tensor")
    return tensors


def _load(member: Member) -> Any:
    """Check the records of the zip archive and the opcodes of its pickle, then unpickle it."""
    if member.read(4) != b"PK\x03\x04":
        raise UserError("its weights are not in the zip format of torch.save")
    with zipfile.ZipFile(cast(IO[bytes], member)) as archive:
        records = {record.filename: record for record in archive.infolist()}
        if len(records) != len(archive.infolist()) or len({name.partition("/")[0] for name in records}) != 1:
            raise UserError("its weights have two records of one name, or no common directory")
        for name, record in records.items():
            if not _RECORD.fullmatch(name) or record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
                raise UserError(f"its weights have a record {name[:80]!r}, which torch.save does not write")
        if archive.comment or min(record.header_offset for record in records.values()):
            raise UserError("its weights have bytes around the zip archive, which torch.save does not write")
        if sum(record.file_size for record in records.values()) > member.size:
            raise UserError("the records of its weights are larger than the file")
        top = next(iter(records)).partition("/")[0]
        if records[f"{top}/data.pkl"].file_size > _MAX_PICKLE:
            raise UserError("its weights have too many entries")
        if f"{top}/byteorder" in records and archive.read(f"{top}/byteorder") != b"little":
            raise UserError("its weights are big-endian; save them on a little-endian machine")
        pickled = archive.read(f"{top}/data.pkl")
        _check_opcodes(pickled)
        storages = {name.rpartition("/")[2]: record for name, record in records.items() if "/data/" in name}
        return _TensorUnpickler(pickled, archive, storages).load()


def _check_opcodes(pickled: bytes) -> None:
    """Check the opcodes without executing them."""
    tuples = 0
    for opcode, argument, _ in pickletools.genops(pickled):
        name = str(argument).replace(" ", ".") if opcode.name == "GLOBAL" else ""
        if opcode.name not in _OPCODES or (name and name not in _GLOBALS):
            raise UserError(f"its weights contain code ({quote_error(name or opcode.name)})")
        tuples += opcode.name.startswith("TUPLE")
        if tuples > _MAX_TUPLES or (opcode.name == "LONG_BINPUT" and (argument or 0) > _MAX_MEMO):
            raise UserError("its weights have too many entries")


class _TensorUnpickler(pickle.Unpickler):
    """Builds dicts, numbers and tensors; every global is replaced by a function or type of this module."""

    def __init__(self, pickled: bytes, archive: zipfile.ZipFile, storages: Mapping[str, zipfile.ZipInfo]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._archive, self._records = archive, storages
        self._storages: dict[str, Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement of a global; `_check_opcodes` has refused all others."""
        if module == "torch":
            return _STORAGES[name]
        return {"OrderedDict": _Dict, "_rebuild_tensor_v2": _tensor, "_rebuild_parameter": _parameter}[name]

    def persistent_load(self, identity: Any) -> Tensor:
        """Return the storage `("storage", dtype, key, device, length)` as a flat tensor; zipfile checks its CRC."""
        _, dtype, key, _, length = identity
        record = self._records[key]
        if type(length) is not int or length * dtype.itemsize != record.file_size:
            raise UserError("a storage in its weights has another length than its pickle says")
        if key not in self._storages:
            values = torch.empty(record.file_size, dtype=torch.uint8)
            buffer, position = values.numpy().data, 0
            with self._archive.open(record) as file:
                while count := file.readinto(buffer[position : position + _CHUNK]):  # type: ignore[attr-defined]
                    position += count
            if position != record.file_size:
                raise UserError("its weights are truncated")
            self._storages[key] = values
        return self._storages[key].view(dtype)


class _Dict(dict[Any, Any]):
    """Replaces OrderedDict; attributes that the pickle sets (a module's `_metadata`) are ignored."""

    def __init__(self) -> None:
        super().__init__()

    def __setstate__(self, state: object) -> None:
        pass


def _tensor(storage: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: object) -> Tensor:
    """Replaces torch._utils._rebuild_tensor_v2; returns a contiguous part of a storage."""
    count = math.prod(size)
    expected = torch.empty(size, device="meta").stride()
    contiguous = all(a == b for n, a, b in zip(size, stride, expected, strict=True) if n > 1) or count == 0
    if not (contiguous and 0 <= offset <= offset + count <= len(storage)):
        raise UserError("its weights contain a tensor that is not contiguous, or larger than its storage")
    return storage[offset : offset + count].view(size)


def _parameter(tensor: Tensor, *_: object) -> Tensor:
    """Replaces torch._utils._rebuild_parameter."""
    return tensor

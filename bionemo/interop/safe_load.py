# SPDX-License-Identifier: Apache-2.0
"""Settings and tensors out of bytes that nobody vouches for: nothing is called, imported or expanded on the way.

A file of torch.save is a zip of one pickle and the raw storages. The pickle is looked through first: it may name what
tensors are rebuilt with and nothing else, and each storage must be as long as the pickle says. Then torch reads it
with `weights_only=True`, which by itself would also call what other packages add to torch's list of safe globals.
"""

import io
import pickle
import pickletools
import re
import zipfile
from typing import IO, Any, ClassVar, cast

import torch
import yaml
from torch import Tensor

from bionemo.errors import UserError
from bionemo.interop.fit import short
from bionemo.interop.safe_tar import Member

_MOST_YAML, _MOST_PICKLE = 1 << 17, 4 << 20  # bytes; v1 needs some 10 KB, and 200 KB for 600 tensors
_MOST_TUPLES, _MOST_MEMOS = 20_000, 1 << 20  # tuples in tuples are hashed on C's stack, memos are an array
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
# What pickling tensors, dicts and numbers with protocol 2, torch.save's, takes.
_OPCODES = {
    "PROTO", "STOP", "MARK", "GLOBAL", "REDUCE", "BUILD", "BINPERSID", "BINPUT", "LONG_BINPUT", "BINGET",
    "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE",
    "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM",
    "SETITEMS",
}  # fmt: skip


class _PlainLoader(yaml.SafeLoader):
    """YAML without tags and aliases: the one could make objects, the other a document larger than its text.

    Dates stay text.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        letter: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) is not None:
            raise yaml.YAMLError("tags and aliases are not read")
        return super().compose_node(parent, index)


def load_settings(member: Member) -> dict[str, Any]:
    """Read a YAML mapping; interpolations stay the text they are.

    Raises:
        UserError: when it is no mapping, too long, or anything but plain values.
    """
    if member.size > _MOST_YAML:
        raise UserError("its configuration is too long to be one")
    try:
        settings = yaml.load(member.read(), _PlainLoader)
    except Exception as error:  # whatever a parser makes of hostile text
        raise UserError(f"its configuration is not plain YAML ({short(error)})") from error
    if not (isinstance(settings, dict) and all(isinstance(key, str) for key in settings)):
        raise UserError("its configuration is not a mapping of keys to values")
    return settings


def load_tensors(member: Member) -> dict[str, Tensor]:
    """Read a state dict that torch.save wrote, alone or under "state_dict"; entries that are None are left out.

    Raises:
        UserError: when it holds anything else than contiguous tensors, or is damaged.
    """
    try:
        _look_through(member)
        member.seek(0)
        state = torch.load(cast(IO[bytes], member), map_location="cpu", weights_only=True)
    except UserError:
        raise
    except Exception as error:  # whatever zipfile, pickle and torch make of hostile bytes
        raise UserError(f"its weights cannot be read ({short(error)})") from error
    state = state.get("state_dict", state) if isinstance(state, dict) else state
    if not isinstance(state, dict):
        raise UserError("its weights are no state dict")
    tensors = {name: value for name, value in state.items() if value is not None}
    for name, value in tensors.items():
        if not isinstance(name, str):
            raise UserError("its weights have an entry without a name")
        if not (isinstance(value, Tensor) and value.is_contiguous()):
            raise UserError(f"its weights hold {name[:80]!r}, which is no plain tensor")
    return {name: value.detach() for name, value in tensors.items()}


def _look_through(member: Member) -> None:
    """Refuse a file in which torch.load would find anything but tensors, or more bytes than there are."""
    if member.read(4) != b"PK\x03\x04":
        raise UserError("its weights are not in the zip format of torch.save")
    with zipfile.ZipFile(member) as archive:
        records = {record.filename: record for record in archive.infolist()}
        if len(records) != len(archive.infolist()) or len({name.partition("/")[0] for name in records}) != 1:
            raise UserError("its weights have two records of one name")
        for name, record in records.items():
            if not _RECORD.fullmatch(name) or record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
                raise UserError(f"its weights have a record {name[:80]!r}, which torch.save does not write")
        if sum(record.file_size for record in records.values()) > member.size:
            raise UserError("its weights claim to be larger than they are")
        top = next(iter(records)).partition("/")[0]
        if records[f"{top}/data.pkl"].file_size > _MOST_PICKLE:
            raise UserError("its weights have too many entries")
        pickled = archive.read(f"{top}/data.pkl")
        _only_tensors(pickled)
        sizes = {name.rpartition("/")[2]: record.file_size for name, record in records.items() if "/data/" in name}
        _Inspector(io.BytesIO(pickled), sizes).load()
        if archive.testzip():  # torch does not compare checksums
            raise UserError("its weights are damaged: a checksum does not match")


def _only_tensors(pickled: bytes) -> None:
    """Go through the opcodes without carrying them out."""
    tuples = 0
    for opcode, argument, _ in pickletools.genops(pickled):
        name = str(argument).replace(" ", ".") if opcode.name == "GLOBAL" else ""
        if opcode.name not in _OPCODES or (name and name not in _GLOBALS):
            raise UserError(f"its weights hold code ({short(name or opcode.name)})")
        tuples += opcode.name.startswith("TUPLE")
        if tuples > _MOST_TUPLES or (opcode.name == "LONG_BINPUT" and (argument or 0) > _MOST_MEMOS):
            raise UserError("its weights have too many entries")


class _Inspector(pickle.Unpickler):
    """Builds nothing; compares the length of each storage with what the pickle says of it."""

    def __init__(self, pickled: io.BytesIO, sizes: dict[str, int]) -> None:
        super().__init__(pickled)
        self.sizes = sizes
        self.empty = type("Empty", (dict,), {"__init__": lambda self: None})  # what is asked of it, it is new for
        self.rebuilt = type("Rebuilt", (), {"__init__": lambda self, *parts: None})

    def find_class(self, module: str, name: str) -> Any:
        """Give a stand-in for each of the few globals."""
        if module == "torch":
            return _STORAGES[name]
        return self.empty if name == "OrderedDict" else self.rebuilt

    def persistent_load(self, identity: Any) -> None:
        """Take a storage's `("storage", type, key, device, length)`."""
        _, dtype, key, _, length = identity
        if type(length) is not int or length * dtype.itemsize != self.sizes[key]:
            raise UserError("its weights have a storage of another length than they say")

# SPDX-License-Identifier: Apache-2.0
"""Archives in the format of BioNeMo v1, valid and malformed."""

import io
import multiprocessing
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from bionemo.common.errors import UserError
from bionemo.formats.nemo_archive import read, to_nemo_names
from bionemo.formats.nemo_models import get_nemo_model

FORK = multiprocessing.get_context("fork")  # the child needs no new imports

TARGETS = {
    "esm1nv": "bionemo.model.protein.esm1nv.esm1nv_model.ESM1nvModel",
    "esm2nv": "bionemo.model.protein.esm1nv.esm1nv_model.ESM2nvModel",
}


def tiny(name: str = "esm1nv", layers: int = 1, multiple: int = 128) -> dict[str, Any]:
    """Return the keys of a v1 configuration that are read."""
    return {
        "target": TARGETS[name], "hidden_size": 8, "num_attention_heads": 2, "kv_channels": None,
        "ffn_hidden_size": 16, "num_layers": layers, "max_position_embeddings": 6,
        "make_vocab_size_divisible_by": multiple,
    }  # fmt: skip


def some_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Return random weights under our names, with values that only a bitwise comparison distinguishes."""
    generator = torch.Generator().manual_seed(seed)
    table = get_nemo_model(config).weights(config)
    weights = {name: torch.randn(weight.shape, generator=generator) for name, weight in table.items()}
    weights["lm_head.bias"][:3] = torch.tensor([-0.0, float("inf"), 1e-42])
    return weights


def saved(value: object, **options: Any) -> bytes:
    """Return the bytes written by torch.save."""
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def nemo_state(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights under NeMo's names."""
    return to_nemo_names(get_nemo_model(config), config, weights)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Return whether names, types, shapes and bits are equal."""
    return found.keys() == expected.keys() and all(
        (found[name].dtype, found[name].shape) == (weight.dtype, weight.shape)
        and torch.equal(bits(found[name]), bits(weight))
        for name, weight in expected.items()
    )


def as_yaml(config: Mapping[str, Any]) -> bytes:
    return yaml.safe_dump(dict(config)).encode()


def entry(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, **more: Any) -> tuple[tarfile.TarInfo, bytes]:
    """Return a member of a tar; `more` are fields of its header."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(data)
    for key, value in more.items():
        setattr(info, key, value)
    return info, data


def tar(path: Path, entries: Iterable[tuple[tarfile.TarInfo, bytes]], mode: str = "w:", **options: Any) -> Path:
    """Write a tar of any members."""
    with tarfile.open(path, mode, **options) as archive:  # type: ignore[call-overload]
        for info, data in entries:
            archive.addfile(info, io.BytesIO(data))
    return path


def archive(path: Path, config: bytes, weights: bytes, *more: tuple[tarfile.TarInfo, bytes], mode: str = "w:") -> Path:
    """Write a .nemo file of one rank."""
    members = [entry("./model_config.yaml", config), entry("./model_weights.ckpt", weights), *more]
    return tar(path, members, mode)


OURS = some_weights(tiny())
CONFIG, WEIGHTS = as_yaml(tiny()), saved(nemo_state(tiny(), OURS))
GOOD = [entry("./model_config.yaml", CONFIG), entry("./model_weights.ckpt", WEIGHTS)]
MARK = "SENTINEL"  # in files of tests: the path of a file that must never be created


def refuse(file: Path) -> str:
    """Check that an archive is rejected in one line and unchanged; return the line."""
    before = file.read_bytes()
    with pytest.raises(UserError) as caught:
        read(file)
    message = str(caught.value)
    assert message.startswith(f"{file} cannot be opened: ")
    assert message.isprintable()
    assert len(message) < len(str(file)) + 300
    assert file.read_bytes() == before
    return message

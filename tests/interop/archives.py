# SPDX-License-Identifier: Apache-2.0
"""Archives as v1 made them, put together by hand, and what those are made of that nobody should make."""

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from bionemo.common.errors import UserError
from bionemo.interop.nemo_archive import read
from bionemo.interop.v1_models import names_of

TARGETS = {
    "esm1nv": "bionemo.model.protein.esm1nv.esm1nv_model.ESM1nvModel",
    "esm2nv": "bionemo.model.protein.esm1nv.esm1nv_model.ESM2nvModel",
}


def tiny(name: str = "esm1nv", layers: int = 1, multiple: int = 128) -> dict[str, Any]:
    """The model section of v1, as far as it matters."""
    return {
        "target": TARGETS[name], "hidden_size": 8, "num_attention_heads": 2, "kv_channels": None,
        "ffn_hidden_size": 16, "num_layers": layers, "max_position_embeddings": 6,
        "make_vocab_size_divisible_by": multiple,
    }  # fmt: skip


def some_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random weights of ours that fit, with a few values that only a comparison of bits tells apart."""
    generator = torch.Generator().manual_seed(seed)
    table = names_of(config).table(config)
    weights = {name: torch.randn(weight.shape, generator=generator) for name, weight in table.items()}
    weights["lm_head.bias"][:3] = torch.tensor([-0.0, float("inf"), 1e-42])
    return weights


def saved(value: object, **options: Any) -> bytes:
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def state_of_v1(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights by v1's names."""
    return names_of(config).to_v1(config, weights)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Equal in names, types, shapes and to the bit."""
    return found.keys() == expected.keys() and all(
        (found[name].dtype, found[name].shape) == (weight.dtype, weight.shape)
        and torch.equal(bits(found[name]), bits(weight))
        for name, weight in expected.items()
    )


def as_yaml(config: Mapping[str, Any]) -> bytes:
    return yaml.safe_dump(dict(config)).encode()


def entry(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, **more: Any) -> tuple[tarfile.TarInfo, bytes]:
    """A member of a tar; `more` are fields of its header."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(data)
    for key, value in more.items():
        setattr(info, key, value)
    return info, data


def tar(path: Path, entries: Iterable[tuple[tarfile.TarInfo, bytes]], mode: str = "w:", **options: Any) -> Path:
    """Write a tar of any members whatever."""
    with tarfile.open(path, mode, **options) as archive:  # type: ignore[call-overload]
        for info, data in entries:
            archive.addfile(info, io.BytesIO(data))
    return path


def archive(path: Path, config: bytes, weights: bytes, *more: tuple[tarfile.TarInfo, bytes], mode: str = "w:") -> Path:
    """Write a .nemo file of one rank."""
    members = [entry("./model_config.yaml", config), entry("./model_weights.ckpt", weights), *more]
    return tar(path, members, mode)


OURS = some_weights(tiny())
CONFIG, WEIGHTS = as_yaml(tiny()), saved(state_of_v1(tiny(), OURS))
GOOD = [entry("./model_config.yaml", CONFIG), entry("./model_weights.ckpt", WEIGHTS)]
MARK = "SENTINEL"  # in what a test makes: the path of a file that must never appear


def refuse(file: Path) -> str:
    """See that an archive is refused in one line and left as it is; give the line."""
    before = file.read_bytes()
    with pytest.raises(UserError) as caught:
        read(file)
    told = str(caught.value)
    assert told.startswith(f"{file} is not opened: ")
    assert told.isprintable()
    assert len(told) < len(str(file)) + 300
    assert file.read_bytes() == before
    return told

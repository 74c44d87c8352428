# SPDX-License-Identifier: Apache-2.0
"""`.nemo` archives, in which v1 and NeMo keep a trained model: a tar of its configuration and its weights.

    ./model_config.yaml                                    v1's `model` section, at top level
    ./model_card.md                                        ours: what it is, for people
    ./model_weights.ckpt                                   torch.save of its state dict,
    ./mp_rank_00/model_weights.ckpt                        or one for each rank of tensor parallelism,
    ./tp_rank_00_pp_rank_000/model_weights.ckpt            or one for each rank of that and of the pipeline

The layout is that of NeMo 1.23's `NLPSaveRestoreConnector`. Reading runs nothing that an archive holds, whoever made
it (see safe_tar.py and safe_load.py). Neither NeMo nor Megatron is needed for either.
"""

import os
import re
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import yaml
from torch import Tensor

from bionemo.common.errors import UserError
from bionemo.common.files import sync
from bionemo.common.redaction import redact_tree
from bionemo.interop.safe_load import load_settings, load_tensors
from bionemo.interop.safe_tar import BLOCK, Member, opened
from bionemo.interop.v1_models import names_of
from bionemo.interop.v1_ranks import join

CONFIG, WEIGHTS, CARD = "model_config.yaml", "model_weights.ckpt", "model_card.md"
_RANK = re.compile(r"(?:[mt]p_rank_([0-9]{2})(?:_pp_rank_([0-9]{3}))?/)?model_weights\.ckpt")


@dataclass(frozen=True)
class NemoArchive:
    """What an archive holds.

    Attributes:
        config: its model_config.yaml as it stands, class paths and interpolations as text: import none of the one and
            resolve none of the other.
        weights: the whole weights by our names, in the types they were saved in.
    """

    config: dict[str, Any]
    weights: dict[str, Tensor]


def read(path: str | Path) -> NemoArchive:
    """Read an archive of v1, of NeMo or of ours, of however many ranks; each weight is in memory once.

    Raises:
        UserError: when it cannot be read, is not such an archive, or could do more than hold weights.
    """
    path = Path(path)
    try:
        with opened(path) as members:
            if CONFIG not in members:
                raise UserError(f"it has no {CONFIG}")
            config = load_settings(members[CONFIG])
            names = names_of(config)
            stages = [[load_tensors(rank) for rank in ranks] for ranks in _stages(members)]
            return NemoArchive(config, join(names, config, stages))
    except UserError as error:
        raise UserError(f"{path} is not opened: {error}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def write(path: str | Path, config: Mapping[str, Any], weights: Mapping[str, Tensor], card: str = "") -> None:
    """Write an archive that v1's tools and NeMo's SaveRestoreConnector open; it appears when it is complete.

    Nothing is kept twice: the weights go from memory to where they stay in the file.

    Args:
        path: of the archive; an existing one is replaced.
        config: the model section of our configuration, of plain values.
        weights: by our names, of the whole model.
        card: the model card.

    Raises:
        UserError: when the weights are not those of the configuration, or there is no room; what was there before is
            untouched.
    """
    path = Path(path)
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        names = names_of(config)
        state = {name: _plain(weight) for name, weight in names.to_v1(config, weights).items()}
        settings = yaml.safe_dump(redact_tree(names.v1_config(config)), sort_keys=False, allow_unicode=True).encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        parts: dict[str, Callable[[BinaryIO], object]] = {CONFIG: lambda file: file.write(settings)}
        if card:
            parts[CARD] = lambda file: file.write(card.encode())
        _write(unfinished, parts | {WEIGHTS: lambda file: torch.save(state, file)})
        os.replace(unfinished, path)
        sync(path.parent)
    except UserError as error:
        raise UserError(f"{path} is not written: {error}") from error
    except (OSError, RuntimeError) as error:  # torch hides the one in the other
        reason = error if isinstance(error, OSError) else error.__context__
        if not isinstance(reason, OSError):
            raise
        raise UserError(
            f"{path} could not be written ({reason.strerror}): make room or choose another path"
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)


def _stages(members: Mapping[str, Member]) -> list[list[Member]]:
    """Files of weights, by rank of the pipeline and of tensor parallelism."""
    files = {name: rank for name in members if (rank := _RANK.fullmatch(name))}
    ranks = {(int(rank[2] or 0), int(rank[1] or 0)): members[name] for name, rank in files.items()}
    stages, tensor_ranks = (1 + max((rank[i] for rank in ranks), default=0) for i in (0, 1))
    if not len(files) == len(ranks) == stages * tensor_ranks:
        raise UserError(f"it has no {WEIGHTS}, or not one for each rank")
    return [[ranks[stage, rank] for rank in range(tensor_ranks)] for stage in range(stages)]


def _plain(weight: Tensor) -> Tensor:
    """On the CPU, and no part of something larger, which torch.save would write as well."""
    weight = weight.detach().cpu().contiguous()
    return weight if weight.untyped_storage().nbytes() == weight.nbytes else weight.clone()


def _write(path: Path, parts: Mapping[str, Callable[[BinaryIO], object]]) -> None:
    """A tar whose members are written in place: each header follows when its size is known."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        for name, write_to in parts.items():
            header = file.tell()
            file.write(bytes(BLOCK))
            write_to(file)
            end = file.tell()
            file.write(bytes(-end % BLOCK))
            info = tarfile.TarInfo(f"./{name}")
            info.size = end - header - BLOCK
            file.seek(header)
            file.write(info.tobuf(tarfile.GNU_FORMAT))  # one block, whatever the size
            file.seek(0, os.SEEK_END)
        file.write(bytes(tarfile.RECORDSIZE - file.tell() % tarfile.RECORDSIZE + tarfile.RECORDSIZE))
        file.flush()
        os.fsync(file.fileno())

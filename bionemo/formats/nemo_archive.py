# SPDX-License-Identifier: Apache-2.0
"""`.nemo` archives, in which BioNeMo v1 and NeMo store a trained model: a tar of its configuration and its weights.

    ./model_config.yaml                                    `model` section of the configuration
    ./model_card.md                                        model card, written by this package only
    ./model_weights.ckpt                                   state dict, written by torch.save,
    ./mp_rank_00/model_weights.ckpt                        or one per tensor parallel rank,
    ./tp_rank_00_pp_rank_000/model_weights.ckpt            or one per tensor and pipeline parallel rank

The layout is that of NeMo 1.23's `NLPSaveRestoreConnector`. Reading an untrusted archive executes
nothing (see safe_load.py). Neither NeMo nor Megatron is imported.
"""

import os
import re
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

import torch
import yaml
from torch import Tensor

from bionemo.common.errors import UserError
from bionemo.common.files import sync
from bionemo.common.redaction import redact_tree
from bionemo.formats.merge_ranks import check_weights, merge_ranks
from bionemo.formats.nemo_models import NemoModel, get_nemo_model
from bionemo.formats.safe_load import load_settings, load_tensors, open_tar
from bionemo.formats.weight_names import rotary_frequencies

CONFIG, WEIGHTS, CARD = "model_config.yaml", "model_weights.ckpt", "model_card.md"
_RANK = re.compile(r"(?:[mt]p_rank_([0-9]{2})(?:_pp_rank_([0-9]{3}))?/)?model_weights\.ckpt")


@dataclass(frozen=True)
class NemoArchive:
    """Content of an archive."""

    # Content of model_config.yaml; class paths are not imported and interpolations not resolved.
    config: dict[str, Any]
    weights: dict[str, Tensor]  # whole weights by our names, in the types they were saved in


def read(path: str | Path) -> NemoArchive:
    """Read an archive of BioNeMo v1, NeMo or this package, saved by any number of ranks.

    Raises:
        UserError: if it cannot be read, is not such an archive, or contains anything but weights.
    """
    path = Path(path)
    try:
        with open_tar(path) as members:
            if CONFIG not in members:
                raise UserError(f"it contains no {CONFIG}")
            config = load_settings(members[CONFIG])
            model = get_nemo_model(config)
            stages = [[load_tensors(rank) for rank in ranks] for ranks in _find_ranks(members)]
            return NemoArchive(config, merge_ranks(model, config, stages))
    except UserError as error:
        raise UserError(f"{path} cannot be opened: {error}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def write(path: str | Path, config: Mapping[str, Any], weights: Mapping[str, Tensor], model_card: str = "") -> None:
    """Write an archive that BioNeMo v1 and NeMo's SaveRestoreConnector open; it appears when it is complete.

    An existing file is replaced. `config` is the `model` section of our configuration, `weights` has our names.

    Raises:
        UserError: if the weights do not match the configuration, or the disk is full; an existing file stays as it
            was.
    """
    path = Path(path)
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        model = get_nemo_model(config)
        state = {name: _compact(weight) for name, weight in to_nemo_names(model, config, weights).items()}
        settings = redact_tree(model.to_nemo_config(config))
        text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
        members: dict[str, Callable[[BinaryIO], object]] = {CONFIG: lambda file: file.write(text.encode())}
        if model_card:
            members[CARD] = lambda file: file.write(model_card.encode())
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_tar(unfinished, members | {WEIGHTS: lambda file: torch.save(state, file)})
        os.replace(unfinished, path)
        sync(path.parent)
    except UserError as error:
        raise UserError(f"{path} cannot be written: {error}") from error
    except (OSError, RuntimeError) as error:  # torch.save raises a RuntimeError with the OSError as its context
        reason = error if isinstance(error, OSError) else error.__context__
        if not isinstance(reason, OSError):
            raise
        raise UserError(
            f"{path} could not be written ({reason.strerror}): free disk space or choose another path"
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)


def to_nemo_names(model: NemoModel, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict of a `.nemo` file for weights by our names.

    Raises:
        UserError: if the weights do not match the configuration.
    """
    expected = model.weights(config)
    check_weights(expected, weights)
    state: dict[str, Tensor] = {}
    for ours, weight in expected.items():
        copies = [copy for copy, original in model.names.copies.items() if original in weight.theirs]
        state |= {model.prefix + name: weights[ours] for name in (*weight.theirs, *copies)}
    if model.rotary:
        state["model.language_model.rotary_pos_emb.inv_freq"] = rotary_frequencies(config)
    return state


def _find_ranks(members: Mapping[str, IO[bytes]]) -> list[list[IO[bytes]]]:
    """Return the files of weights by pipeline rank and tensor rank."""
    files = {name: rank for name in members if (rank := _RANK.fullmatch(name))}
    ranks = {(int(rank[2] or 0), int(rank[1] or 0)): members[name] for name, rank in files.items()}
    stages, tensor_ranks = (1 + max((rank[i] for rank in ranks), default=0) for i in (0, 1))
    if not len(files) == len(ranks) == stages * tensor_ranks:
        raise UserError(f"it contains no {WEIGHTS}, or not one for each rank")
    return [[ranks[stage, rank] for rank in range(tensor_ranks)] for stage in range(stages)]


def _compact(weight: Tensor) -> Tensor:
    """Move a tensor to the CPU; copy a part of a larger storage, which torch.save would write as a whole."""
    weight = weight.detach().cpu().contiguous()
    return weight if weight.untyped_storage().nbytes() == weight.nbytes else weight.clone()


def _write_tar(path: Path, members: Mapping[str, Callable[[BinaryIO], object]]) -> None:
    """Write the members directly into the tar; each header is filled in when the size of its member is known."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        for name, write_to in members.items():
            header = file.tell()
            file.write(bytes(tarfile.BLOCKSIZE))
            write_to(file)
            end = file.tell()
            file.write(bytes(-end % tarfile.BLOCKSIZE))
            info = tarfile.TarInfo(f"./{name}")
            info.size = end - header - tarfile.BLOCKSIZE
            file.seek(header)
            file.write(info.tobuf(tarfile.GNU_FORMAT))  # always one block
            file.seek(0, os.SEEK_END)
        file.write(bytes(tarfile.RECORDSIZE - file.tell() % tarfile.RECORDSIZE + tarfile.RECORDSIZE))
        file.flush()
        os.fsync(file.fileno())

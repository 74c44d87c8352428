# SPDX-License-Identifier: Apache-2.0
"""Between checkpoints, `.nemo` archives and Hugging Face's directories: any of the three to another."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from bionemo.checkpoint import Checkpoint, LanguageModelWithin, TensorsInMemory, TensorSource, check, tools
from bionemo.common.errors import UserError
from bionemo.interop import huggingface, nemo_archive
from bionemo.interop.model_card import card, history_of
from bionemo.interop.v1_models import names_of

CHECKPOINT, NEMO, HUGGING_FACE = "checkpoint", "nemo", "hf"


class Model(NamedTuple):
    """A trained model, wherever it comes from."""

    config: Mapping[str, Any]  # the model section of our configuration, as far as it is known
    words: int | None  # size of the vocabulary, without padding
    weights: TensorSource
    history: Mapping[str, str] = {}  # of its training, for the model card
    contact_head: huggingface.ContactHead | None = None


def convert(source: Path, target: Path, to: str | None = None) -> None:
    """Write the weights of one as another.

    Args:
        source: what is there; what it is follows from its name or its content.
        target: what to make.
        to: "hf" for a Hugging Face directory; None: an archive if the name ends in .nemo, else a checkpoint.

    Raises:
        UserError: when the source cannot be read, there is no conversion between the two, or the target exists or
            cannot be written.
    """
    given, wanted = kind_of(source), to or (NEMO if is_archive(target) else CHECKPOINT)
    if given == wanted:
        why = {
            CHECKPOINT: "a checkpoint needs no conversion between layouts, every tensor, pipeline and data-parallel "
            "size reads it as it is; for a .nemo archive name TARGET.nemo, for Hugging Face give --to=hf",
            NEMO: "both are .nemo archives; name a directory to make a checkpoint",
            HUGGING_FACE: "it is Hugging Face's already; without --to=hf a checkpoint is made",
        }
        raise UserError(f"{source} -> {target}: {why[given]}")
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} exists: name another target, or remove it")
    if wanted == NEMO:
        export(source, target)
        return
    model = open_model(source)
    if wanted == HUGGING_FACE:
        if model.words is None:
            raise UserError(f"{source} does not say how many words its model knows, which {target} needs")
        huggingface.write(target, model.config, model.words, model.weights, model.contact_head, model.history)
    else:
        known = {"model._target_": model.config["_target_"], "words": model.words}
        state: dict[str, Any] = {"config": dict(model.config), "model": known}
        if model.contact_head:
            state["contact_head"] = model.contact_head
        tools.write_weights(target, state, _read(model.weights))


def export(source: Path, target: Path) -> None:
    """Write the weights of a checkpoint, or of a directory of Hugging Face's, as a .nemo archive of any name.

    Raises:
        UserError: when the source is damaged or does not know its model, or there is no room.
    """
    model = open_model(source)
    config = names_of(model.config).with_words(model.config, model.words)
    about = card(target.name, model.config, model.words, model.weights, model.history, "")
    nemo_archive.write(target, config, dict(_read(model.weights)), about)


def _read(weights: TensorSource) -> Iterator[tuple[str, Tensor]]:
    return ((name, weights.read(f"weights/{name}")) for name in weights.shapes("weights"))


def open_model(path: Path) -> Model:
    """Open a checkpoint, an archive or a directory of Hugging Face's.

    Raises:
        UserError: when it cannot be read, or does not know its model.
    """
    if is_archive(path):
        archive = nemo_archive.read(path)
        names = names_of(archive.config)
        weights = TensorsInMemory(path, archive.weights)
        return Model(names.our_config(archive.config), names.vocabulary(archive.config), weights)
    if huggingface.is_directory(path):
        directory = huggingface.HuggingFaceModel(path)
        return Model(directory.config, directory.words, directory, contact_head=directory.contact_head)
    check(path)
    saved = Checkpoint(path)
    config = saved.state.get("config")
    if not (config and config.get("_target_")):
        raise UserError(f"{path} does not hold the configuration of its model, without which it cannot be converted")
    history = history_of(saved.state, saved.manifest)
    try:
        contact_head = huggingface.checked(saved.state.get("contact_head"), config)
    except UserError as error:
        raise UserError(f"checkpoint {path} cannot be used: {error}; take another or remove it") from error
    known = dict(saved.state["model"]) if isinstance(saved.state.get("model"), dict) else {}
    own: TensorSource = LanguageModelWithin(saved) if "task" in known else saved
    return Model(config, tools.words(known), own, history, contact_head)


def describe(path: Path, every_tensor: bool = False) -> str:
    """Say in lines what a checkpoint, an archive or a directory of Hugging Face's holds.

    Raises:
        UserError: when it cannot be read.
    """
    kind = kind_of(path)
    if kind == CHECKPOINT:
        return tools.describe(path, every_tensor)
    model = open_model(path)
    shapes = model.weights.shapes("weights")
    lines = {
        {NEMO: "archive", HUGGING_FACE: "Hugging Face"}[kind]: str(path),
        "model": str(model.config["_target_"]),
        "parameters": tools.parameters(shapes),
        "vocabulary": f"{model.words:,} tokens",
        "layers": str(model.config.get("num_layers", "not said")),
        "hidden size": str(model.config.get("hidden_size", "not said")),
    }
    return tools.in_lines(lines, shapes if every_tensor else {})


def kind_of(path: Path) -> str:
    """What a path names: by its end, or by what is in it."""
    if is_archive(path):
        return NEMO
    return HUGGING_FACE if huggingface.is_directory(path) else CHECKPOINT


def is_archive(path: Path) -> bool:
    """Whether a path names a .nemo archive."""
    return path.suffix == ".nemo"

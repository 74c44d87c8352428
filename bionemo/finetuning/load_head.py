# SPDX-License-Identifier: Apache-2.0
"""Load the head of a fine-tuning run and predict labels with it."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bionemo.analysis.files import is_fasta, read_nonempty_table
from bionemo.checkpoint.tensors import checksum_weights
from bionemo.checkpoint.tools import iterate_weights
from bionemo.common.console import notify
from bionemo.common.errors import UserError
from bionemo.common.regular import require_regular
from bionemo.data.columns import find_id_column
from bionemo.data.files import SMILES_EXTENSIONS
from bionemo.data.shards.formats import Fasta
from bionemo.data.shards.records import TextRecords
from bionemo.data.shards.smiles_format import find_formats
from bionemo.finetuning.heads import Head, SequenceHead, TokenHead
from bionemo.finetuning.splits import find_sequences
from bionemo.finetuning.variants import compute_variant_vectors
from bionemo.formats.convert import open_model
from bionemo.formats.detect import CONFIG
from bionemo.formats.huggingface.files import open_tensors, read_json
from bionemo.inference.batching import DEFAULT_LIMITS
from bionemo.inference.model import Sequences, TrainedModel
from bionemo.megatron.finite import all_finite

_CLASSIFIER = "classifier.weight", "classifier.bias"  # of EsmForTokenClassification


class TrainedHead(NamedTuple):
    """The content of `head.safetensors`."""

    head: Head
    classes: tuple[str, ...]  # names of the outputs: classes, labels or targets; () for a single number
    encoder: Path  # path of the model that the head was trained with
    wild_type: str | None  # if the head predicts labels of variants of one protein
    encoder_weights: str  # checksum of the weights of that model
    run: str  # fingerprint of the run
    task_type: str

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the predictions of `predict_labels`."""
        more = {"multi-label": self.classes, "classification": ("probability",)}.get(self.task_type, ())
        return self.classes if self.task_type == "regression" and self.classes else ("prediction", *more)


def read_trained_head(path: Path) -> TrainedHead:
    """Read a head; its architecture follows from the shapes of its weights.

    The directory of an EsmForTokenClassification of transformers is a head, too, with the model beside it.

    Raises:
        UserError: if the file cannot be read, is not a head, or has weights that are not finite.
    """
    if path.is_dir():
        return _read_classifier(path)
    try:
        require_regular(path)
        with safe_open(path, "pt") as file:
            task = json.loads((file.metadata() or {})["task"])
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        classes, encoder = tuple(map(str, task["classes"])), Path(str(task["encoder"])).absolute()
        wild_type = None if task["wild_type"] is None else str(task["wild_type"])
        encoder_weights, run = str(task["encoder_weights"]), str(task["run"])
        task_type = str(task["task_type"])
        head = _build_head(weights, max(len(classes), 1), task_type.startswith("token-level"))
        head.load_state_dict(weights)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): check the path") from error
    except (SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{path} is not the head of a fine-tuning run ({str(error).splitlines()[0][:80]}): give "
            "RUN/head.safetensors"
        ) from error
    if not all_finite(weights.values()):
        raise UserError(f"{path} has weights that are not finite: train the head again")
    return TrainedHead(head.eval(), classes, encoder, wild_type, encoder_weights, run, task_type)


def _read_classifier(directory: Path) -> TrainedHead:
    """Read a linear classifier of residues, which two convolutions express: y = relu(y) - relu(-y)."""
    settings = read_json(directory / CONFIG)
    if (found := settings.get("architectures")) != ["EsmForTokenClassification"]:
        raise UserError(
            f"{directory} holds the model {found}: give RUN/head.safetensors, or an EsmForTokenClassification"
        )
    tensors = {name: tensor.read().float() for name, tensor in open_tensors(directory) if name in _CLASSIFIER}
    weight_CD, bias_C = (tensors[name] for name in _CLASSIFIER)
    count, hidden_size = weight_CD.shape
    names = settings.get("id2label") or {}
    classes = tuple(str(names.get(str(number), number)).removeprefix("LABEL_") for number in range(count))
    if any(len(name) != 1 for name in classes):
        raise UserError(f"{directory}: id2label has {', '.join(classes[:8])}: give each class a name of one letter")
    head = TokenHead(hidden_size, count, 2 * count)
    state = {name: torch.zeros_like(tensor) for name, tensor in head.state_dict().items()} | {
        "scale": torch.ones(hidden_size),
        "first.bias": torch.cat((bias_C, -bias_C)),
    }
    middle = head.first.kernel_size[0] // 2
    state["first.weight"][:, :, middle] = torch.cat((weight_CD, -weight_CD))
    state["second.weight"][:, :, middle] = torch.cat((torch.eye(count), -torch.eye(count)), dim=1)
    head.load_state_dict(state)
    weights = checksum_weights(iterate_weights(open_model(directory).weights))
    return TrainedHead(head.eval(), classes, directory, None, weights, "", "token-level-classification")


def check_encoder(trained: TrainedHead, path: Path, weights: str) -> None:
    """Check that a head was trained with the model at `path`, whose weights have this checksum.

    Raises:
        UserError: if it was trained with another one.
    """
    if not trained.encoder_weights:
        raise UserError("the run that trained the head wrote no checkpoint of its model: train with checkpoints")
    if trained.encoder_weights != weights:
        raise UserError(
            f"{path} has other weights than the model that the head was trained with ({trained.encoder}): use that "
            "model, or train a head for this one"
        )


def _build_head(weights: dict[str, Tensor], outputs: int, per_token: bool) -> Head:
    """Build a head with the sizes of the weights."""
    if "first.weight" in weights:
        width, hidden_size, _ = weights["first.weight"].shape
        return TokenHead(hidden_size, outputs, width)
    numbers = sorted({int(name.split(".")[1]) for name in weights if name.startswith("layers.")})
    sizes = tuple(len(weights[f"layers.{number}.weight"]) for number in numbers[1:-1])
    return SequenceHead(len(weights["layers.0.weight"]), outputs, sizes, per_token=per_token)


def read_records(path: Path, proteins: bool | None = None) -> tuple[list[str], list[str]]:
    """Read ids and sequences of a FASTA file, a table or a .smi file. A record without id is numbered, from 0.

    For `proteins` see `find_sequence_columns`.

    Raises:
        UserError: if the file cannot be read, has no records, or has no column of sequences.
    """
    found_fasta = is_fasta(path)
    if found_fasta or path.suffix.lower() in SMILES_EXTENSIONS:
        with TemporaryDirectory() as directory:  # an index beside the file would be used only once
            source = TextRecords([path], Fasta() if found_fasta else find_formats([path]), index_mapping_dir=directory)
            records = [source.fields(number) for number in range(len(source))]
        ids = [record.get("id") or str(number) for number, record in enumerate(records)]
        return ids, [record["sequence"] for record in records]
    table = read_nonempty_table(path)
    if (name := find_sequences(table, proteins)) is None:
        columns = ", ".join(map(repr, table.columns))
        raise UserError(f"{path} has the columns {columns}: rename the column of the sequences to 'sequence'")
    number = find_id_column(table.columns)
    if number is None:
        notify(
            f"{path}: no column of ids is known, and rows are numbered from 0: rename the column of the ids to 'id'"
        )
    ids = [str(i) for i in range(len(table.rows))] if number is None else [row[number] for row in table.rows]
    return ids, table.column(name, "rename one")


@torch.no_grad()
def predict_labels(model: TrainedModel, trained: TrainedHead, texts: Sequences) -> list[tuple[str, ...]]:
    """Predict for each sequence the texts of `TrainedHead.columns`.

    They are a string of classes or numbers, one per residue; a class and its probability; a number for each target; or
    the labels with a probability of at least 0.5, and the probability of each label. Predictions do not depend on the
    other sequences.

    Raises:
        UserError: if the model cannot read a sequence, its hidden size is not that of the head, a sequence is not a
            variant of the wild type, or a prediction is not finite.
    """
    head, device = trained.head.to(model.device), model.device
    hidden_size = len(head.mean) - len(trained.wild_type or "")
    if hidden_size != model.hidden_size:
        raise UserError(
            f"{model.path} has hidden size {model.hidden_size}, but the head needs {hidden_size}: use "
            f"{trained.encoder}"
        )
    if head.per_token:
        hiddens = (each.to(device) for each in model.hidden_states(texts))
        outputs = [_check_finite(model, head(vectors_RD, [len(vectors_RD)])) for vectors_RD in hiddens]
        if not trained.classes:
            return [(" ".join(f"{value:.7g}" for value in each[:, 0].tolist()),) for each in outputs]
        return [("".join(trained.classes[number] for number in each.argmax(1).tolist()),) for each in outputs]
    if trained.wild_type is None:
        vectors_ND = model.embed(texts)
    else:
        names = [f"sequence {number:,}" for number in range(len(texts))]
        found = compute_variant_vectors(model, trained.wild_type, model.ids(texts), names, DEFAULT_LIMITS)
        vectors_ND = torch.from_numpy(np.concatenate([*found]))
    # one at a time: a matrix product rounds differently for other numbers of rows
    rows = vectors_ND.to(device).split(1)
    predictions = _check_finite(model, torch.cat([head(vectors_RD, [1]) for vectors_RD in rows]))
    if trained.task_type == "regression":
        return [tuple(f"{value:.7g}" for value in row) for row in predictions.tolist()]
    if trained.task_type == "multi-label":
        return [
            (
                ";".join(name for name, value in zip(trained.classes, row, strict=True) if value >= 0.5),
                *(f"{value:.4f}" for value in row),
            )
            for row in predictions.sigmoid().tolist()
        ]
    best = predictions.softmax(1).max(1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [(trained.classes[number], f"{probability:.4f}") for number, probability in pairs]


def _check_finite(model: TrainedModel, predictions_RC: Tensor) -> Tensor:
    if not all_finite([predictions_RC]):
        raise UserError(f"{model.path}: predictions are not finite: use --precision=32, or other weights of the model")
    return predictions_RC

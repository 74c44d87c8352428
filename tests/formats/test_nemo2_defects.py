# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of BioNeMo 2 that cannot be used are rejected in one line, without executing code in them."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp

from bionemo.common.errors import UserError
from bionemo.formats.convert import open_model
from bionemo.formats.nemo2 import Nemo2Directory
from tests.formats.archives import same, saved
from tests.support import nemo2
from tests.support.huggingface import theirs


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Directory of a valid checkpoint, which a test may change."""
    return nemo2.write(tmp_path / "saved", nemo2.weights(theirs(tmp_path / "hf")))


def refuse(path: Path) -> str:
    """Check that a directory is rejected in one line; return the line without the path."""
    with pytest.raises(UserError) as caught:
        open_model(path)
    message = str(caught.value)
    assert message.startswith(f"{path} ")
    assert message.isprintable()
    return message.removeprefix(f"{path} cannot be opened: ")


def values(path: Path) -> dict[str, Tensor]:
    source = open_model(path).weights
    return {name: source.read(f"weights/{name}") for name in source.shapes("weights")}


LOCAL = "bionemo.llm.model.biobert.transformer_specs.BiobertSpecOption.esm2_bert_layer_local_spec"
ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"biobert_spec_option": LOCAL}, f"biobert_spec_option in its io.json is '{LOCAL}'; only {nemo2.SPEC} is"),
    ({"core_attention_override": "my.Attention"}, "core_attention_override in its io.json is 'my.Attention'; only N"),
    ({"position_embedding_type": "learned_absolute"}, "position_embedding_type in its io.json is 'learned_absolute'"),
    ({"normalization": "RMSNorm"}, "normalization in its io.json is 'RMSNorm'; only LayerNorm is supported"),
    ({"activation_func": "my.gelu"}, "activation_func in its io.json is 'my.gelu'; supported are torch._C._nn.gelu"),
    ({"gated_linear_unit": True}, "gated_linear_unit in its io.json is 'True'; only False is supported"),
    ({"add_bias_linear": False}, "add_bias_linear in its io.json is 'False'; only True is supported"),
    ({"rotary_base": 500000}, "rotary_base in its io.json is '500000'; only 10000 is supported"),
    ({"rotary_percent": 0.5}, "rotary_percent in its io.json is '0.5'; only 1.0 is supported"),
    ({"softmax_scale": None}, "softmax_scale in its io.json is 'None'; only 1.0 is supported"),
    ({"seq_len_interpolation_factor": 2.0}, "seq_len_interpolation_factor in its io.json is '2.0'; only None"),
    ({"share_embeddings_and_output_weights": False}, "share_embeddings_and_output_weights in its io.json is 'False'"),
    ({"token_dropout": "yes"}, "token_dropout in its io.json is 'yes', neither true nor false"),
    ({"hidden_size": 64}, "embedding.word_embeddings.weight has shape (128, 32), expected (128, 64) from its conf"),
    ({"num_layers": 3}, "12 weights are missing: 'encoder.layers.2.self_attention.linear_qkv.layer_norm_weight', "),
    ({"num_layers": 1}, "12 weights are unknown: 'encoder.layers.1."),
    ({"num_layers": "x"}, "num_layers in its configuration is not an integer from 1 to 1000"),
    ({"config_class": "bionemo.esm2.model.finetune.sequence_model.ESM2FineTuneSeqConfig"},
     "models of the class 'bionemo.esm2.model.finetune.sequence_model.ESM2FineTuneSeqConfig' are not supported, only "
     "ESM2Config: export it there to Hugging Face (nemo.lightning.io.export_ckpt with target 'hf') and give the new"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), ARGUMENTS)
def test_unsupported_arguments(arguments: dict[str, Any], message: str, path: Path) -> None:
    nemo2.write_context(path, **arguments)
    assert message in refuse(path)


def no_context(path: Path) -> None:
    (path / "context" / "io.json").unlink()


def other_context(path: Path) -> None:
    objects = json.loads((path / "context" / "io.json").read_text())
    del objects["objects"]["about_1"]
    (path / "context" / "io.json").write_text(json.dumps(objects))


def shards(path: Path) -> list[Path]:
    return sorted((path / "weights").glob("*.distcp"))


def truncate(path: Path) -> None:
    os.truncate(shards(path)[0], 100)


DEFECTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no io.json": (
        no_context, "its context/io.json is missing, which holds the architecture: copy context/ and weights/"
    ),
    "no context": (lambda path: shutil.rmtree(path / "context"), "its context/io.json is missing, which holds the"),
    "io.json of another form": (
        other_context, "its context/io.json does not describe a model as NeMo 2 does: export it there to Hugging Face"
    ),
    "io.json is a list": (
        lambda path: (path / "context" / "io.json").write_text("[]"), "its io.json is not a JSON object"
    ),
    "no .metadata": (
        lambda path: (path / "weights" / ".metadata").unlink(),
        "its weights/.metadata is missing: only the format torch_dist is supported",
    ),
    "empty .metadata": (
        lambda path: (path / "weights" / ".metadata").write_bytes(b""),
        "its .metadata is damaged, or of another format (Ran out of input)",
    ),
    "truncated .metadata": (
        lambda path: os.truncate(path / "weights" / ".metadata", 900), "its .metadata is damaged, or of another form"
    ),
    "text in place of .metadata": (
        lambda path: (path / "weights" / ".metadata").write_text("x" * 50), "its .metadata is damaged, or of another"
    ),
    "another pickle": (
        lambda path: (path / "weights" / ".metadata").write_bytes(pickle.dumps({"a": 1})),
        "its .metadata is damaged, or of another format (",
    ),
    "no shard": (lambda path: shards(path)[0].unlink(), "its __0_0.distcp is missing, which contains "),
    "truncated shard": (truncate, "its __0_0.distcp is truncated, which contains "),
}  # fmt: skip


@pytest.mark.parametrize("defect", DEFECTS)
def test_defects(defect: str, path: Path) -> None:
    change, message = DEFECTS[defect]
    change(path)
    assert message in refuse(path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"encoder.final_layernorm.bias": torch.ones(32, dtype=torch.int64)}, "final_layernorm.bias is of type int64"),
        ({"output_layer.bias": torch.ones(32)}, "output_layer.bias has shape (32,), expected (33,)"),
        ({"output_layer.weight": torch.ones(1)}, "1 weights are unknown: 'output_layer.weight'"),
        ({"lm_head.dense.bias": None}, "1 weights are missing: 'lm_head.dense.bias'"),
    ],
)
def test_other_tensors(tensors: dict[str, Any], message: str, tmp_path: Path) -> None:
    weights = nemo2.weights(theirs(tmp_path / "hf")) | tensors
    nemo2.write(tmp_path / "x", {name: tensor for name, tensor in weights.items() if tensor is not None})
    assert message in refuse(tmp_path / "x")


def rewrite(path: Path, change: Callable[[Any], object]) -> None:
    """Change what .metadata contains."""
    file = path / "weights" / ".metadata"
    content = pickle.loads(file.read_bytes())
    change(content)
    file.write_bytes(pickle.dumps(content))


def lose_a_piece(content: Any) -> None:
    content.state_dict_metadata["module.output_layer.bias"].chunks.clear()


def move_a_piece(content: Any) -> None:
    name = "module.output_layer.bias"
    (chunk,), key = content.state_dict_metadata[name].chunks, dcp.MetadataIndex(name, torch.Size([0]))
    chunk.offsets = torch.Size([64])
    content.storage_data[dcp.MetadataIndex(name, torch.Size([64]))] = content.storage_data.pop(key)


def test_missing_pieces(path: Path) -> None:
    rewrite(path, lose_a_piece)
    assert refuse(path) == "output_layer.bias is incomplete: its pieces hold 0 of 128 values"


def test_pieces_outside_of_their_tensor(path: Path) -> None:
    rewrite(path, move_a_piece)
    assert "is damaged, or of another format (a piece of module.output_layer.bias is outside of it)" in refuse(path)


def test_no_file_outside_the_directory_is_opened(path: Path, tmp_path: Path) -> None:
    def change(content: Any) -> None:
        for place in content.storage_data.values():
            place.relative_path = f"../../other/{place.relative_path}"

    before = values(path)
    shutil.copytree(path / "weights", tmp_path / "other")
    rewrite(path, change)
    assert same(values(path), before)
    for file in shards(path):
        file.unlink()
    assert "__0_0.distcp is missing" in refuse(path)


class Exploit:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (self.command,)


class Attribute:
    """Pickled as a call of getattr, as Python 3.11.2 pickles members of enumerations."""

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (dcp.Metadata, "__init__")


class State:
    """Pickled as an inert class of the format, with another state."""

    def __reduce__(self) -> tuple[object, ...]:
        return dcp.Metadata, (), {"state_dict_metadata": {}, "storage_data": {}}


@pytest.mark.parametrize(
    ("attribute", "protocol"),
    [*((None, number) for number in range(6)), ("planner_data", 2), ("planner_data", 5), ("state_dict_metadata", 4)],
)
def test_pickles_that_would_run_code(
    attribute: str | None, protocol: int, path: Path, sentinel: Path
) -> None:  # fmt: skip
    """Names outside of the list are refused wherever they occur, and the message contains them."""
    exploit: Any = Exploit(f"touch {sentinel}")
    file = path / "weights" / ".metadata"
    content: Any = exploit
    if attribute is not None:
        content = pickle.loads(file.read_bytes())
        vars(content)[attribute] = exploit
    file.write_bytes(pickle.dumps(content, protocol))
    assert refuse(path) == "its .metadata is damaged, or of another format (it contains posix.system)"


def test_names_in_the_list_do_nothing(path: Path) -> None:
    """Objects of other releases beside the tensors do not matter; getattr is never called."""
    before = values(path)
    rewrite(path, lambda content: vars(content).update(planner_data=[Attribute(), State(), Path("x")]))
    assert same(values(path), before)


@pytest.mark.parametrize("wrong", ["eval", "exec", "__import__", "setattr", "open"])
def test_builtins_are_refused(wrong: str, path: Path, sentinel: Path) -> None:
    text = f"cbuiltins\n{wrong}\n(S'{sentinel}'\ntR."
    (path / "weights" / ".metadata").write_bytes(text.encode())
    assert f"(it contains builtins.{wrong})" in refuse(path)


def test_pieces_are_read_on_demand(path: Path, sentinel: Path) -> None:
    """Opening reads no piece; a damaged one, or one that is no tensor, is named when it is read."""
    for content in (b"\0" * 1000, saved(Exploit(f"touch {sentinel}")), saved({"a": 1}), saved(torch.ones(5))):
        shutil.copytree(path, path.parent / "copy", dirs_exist_ok=True)
        source = Nemo2Directory(path.parent / "copy")
        for tensor in source._stored.values():
            for piece in tensor.pieces:
                with piece.path.open("r+b") as file:
                    file.seek(piece.start)
                    file.write(content[: piece.length].ljust(piece.length, b"\0"))
        source = Nemo2Directory(path.parent / "copy")
        with pytest.raises(UserError) as caught:
            source.read("weights/word_embeddings.weight")
        assert str(caught.value).startswith(f"{path.parent}/copy/weights/__0_0.distcp is damaged at byte ")
        assert "\n" not in str(caught.value)

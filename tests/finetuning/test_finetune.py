# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning: initial weights, which weights change, and equal results with any parallel layout."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import bionemo
from bionemo.checkpoint import TensorsInMemory
from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.schema import DownstreamConfig
from bionemo.config.schema.data import TaskType
from bionemo.config.schema.downstream import HeadConfig
from bionemo.data.collate import Collator
from bionemo.finetuning.dataset import LabelledData, bits_to_numbers
from bionemo.finetuning.heads import TokenHead, head_factory
from bionemo.finetuning.labels import Split
from bionemo.finetuning.load_head import check_encoder, read_trained_head
from bionemo.finetuning.model import FineTunedModel
from bionemo.megatron.sharding import materialize
from tests.support.finetuning import written
from tests.support.runs import last_checkpoint, logged, read_weights, run, run_on_ranks

LORA = ["model.peft.enabled=True", "model.peft.lora_tuning.adapter_dim=2"]
EVERYWHERE = "model.peft.lora_tuning.target_modules=[attention_qkv,attention_dense,mlp_fc1,mlp_fc2]"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("task") / "data")


def overrides(model: Path, data: Path, *more: str) -> list[str]:
    return [f"model.restore_encoder_path={model}", f"model.data.dataset_path={data}", "model.encoder_frozen=False",
            "model.micro_batch_size=10", "trainer.max_epochs=3", "model.finetuning_optim.lr=0.01", *more]  # fmt: skip


def tune(directory: Path, *given: str) -> list[str]:
    status, console = run(directory, *given, model="task")
    assert status == 0, console
    return console


def weights(directory: Path) -> dict[str, Tensor]:
    return read_weights(last_checkpoint(directory))


@pytest.fixture(scope="module")
def tuned(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Run each fine-tuning method once."""
    done: dict[str, Path] = {}
    ways = {"whole": [], "lora": [*LORA, EVERYWHERE], "last": ["model.freeze_layers=-1"]}

    def directory(way: str) -> Path:
        if way not in done:
            done[way] = tmp_path_factory.mktemp(way) / "run"
            tune(done[way], *overrides(model, data, *ways[way]))
        return done[way]

    return directory


TARGETS: dict[TaskType, list[Any]] = {
    "token-level-classification": [np.array([0, -1, 2, 1, 1]), np.full(30, 1), np.array([-1])],
    "classification": [np.array(2), np.array(0), np.array(1)],
    "regression": [np.array(value, np.float32) for value in (-1.5, 0.0, 3e-8)],
}


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("has_adapters", [False, True])
def test_initial_predictions_equal_the_frozen_model(kind: TaskType, has_adapters: bool, model: Path) -> None:
    """Compare a head on embeddings from `bionemo.load` with the same head in the model to be trained."""
    ours = bionemo.load(model)
    texts = ["MKTAY", "ACD" * 10, "G"]
    split = Split(texts, [np.asarray(target) for target in TARGETS[kind]], texts)
    samples = LabelledData({"train": split}, kind, type(ours.network)).open(
        ours.network.config, ours.network.vocabulary, "train"
    )
    classes = 0 if kind == "regression" else 3

    def head() -> Any:
        config = HeadConfig(cnn_dim=8, hidden_layer_size=8, dropout=0.5)
        return head_factory(config, kind, ours.hidden_size, classes)()

    collate = Collator(samples, 3, ours.network.vocabulary.pad_id, dynamic_padding=True)
    batch = collate([[(np.zeros(3, np.int64), np.arange(3))]])[0].unpack()
    saved = TensorsInMemory(model, {name: tensor.clone() for name, tensor in ours.network.state_dict().items()})
    given = [f"model.data.task_type={kind}", f"model.peft.enabled={has_adapters}", "model.data.task_name=x"]
    cfg = load("downstream_table", given, schema=DownstreamConfig)
    with torch.device("meta"):
        network = type(ours.network)(ours.network.config, ours.network.vocabulary)  # type: ignore[arg-type]
        found = FineTunedModel(network, head, saved, cfg.model, [batch])
    materialize(found, torch.device("cpu"))
    found.initialize_weights(7)
    found.eval()
    with torch.no_grad():
        predictions = found(batch)
        if kind == "token-level-classification":
            vectors = torch.cat(ours.hidden_states(split.texts))
            expected = found.head(vectors, [5, 30, 1])[torch.from_numpy(np.concatenate(split.targets)) >= 0]
        else:
            expected = found.head(ours.embed(split.texts), [1, 1, 1])
    torch.testing.assert_close(predictions, expected, rtol=1e-5, atol=1e-4)
    read = torch.cat(ours.hidden_states(split.texts)) if found.head.per_token else ours.embed(split.texts)
    np.testing.assert_allclose(found.head.mean.numpy(), read.mean(0), atol=1e-5)
    np.testing.assert_allclose(1 / found.head.scale.numpy(), read.std(0, correction=0), rtol=1e-3)
    if kind == "regression":
        assert float(found.head.target_scale) == pytest.approx(np.std([-1.5, 0.0, 3e-8]))
    labels = np.concatenate([np.atleast_1d(target) for target in split.targets])
    loss, count = found.compute_loss(batch)
    if kind == "regression":
        assert bits_to_numbers(batch.target_ids).tolist() == labels.tolist()
        assert float(loss) == pytest.approx(float(((expected[:, 0].numpy() - labels) ** 2).sum()), rel=1e-4)
    else:
        chances = expected.log_softmax(1).numpy()
        labels = labels[labels >= 0]
        assert float(loss) == pytest.approx(-float(chances[np.arange(len(labels)), labels].sum()), rel=1e-4)
    assert count == len(expected)


def test_full_fine_tuning_changes_the_whole_encoder(tuned: Callable[[str], Path], model: Path) -> None:
    """All encoder weights change, the language-model head does not; the report describes the best checkpoint."""
    directory = tuned("whole")
    report = json.loads((directory / "report.json").read_text())
    assert report["test_accuracy"] > 80
    assert [round(epoch["epoch"]) for epoch in report["epochs"]] == [1, 2, 3]
    losses = [epoch["val_loss"] for epoch in report["epochs"]]
    assert report["val_loss"] == min(losses) < losses[0]
    before, after = bionemo.load(model).network.state_dict(), weights(directory)
    for name, tensor in before.items():
        assert torch.equal(after[f"encoder.{name}"], tensor) == name.startswith("lm_head"), name
    again = bionemo.load(next(directory.glob("checkpoints/*.nemo")))
    assert not np.allclose(again.embed(["MKTAY"]), bionemo.load(model).embed(["MKTAY"]), atol=1e-3)


def test_frozen_layers_do_not_change(tuned: Callable[[str], Path], model: Path) -> None:
    before, after = bionemo.load(model).network.state_dict(), weights(tuned("last"))
    changed = {name for name, tensor in before.items() if not torch.equal(after[f"encoder.{name}"], tensor)}
    assert changed == {name for name in before if name.startswith(("encoder.layers.1.", "encoder.final_layernorm."))}


def test_pretrained_weights_have_their_own_learning_rate(model: Path, data: Path, tmp_path: Path) -> None:
    """Adam's first update is proportional to the learning rate; that of the head does not depend on the encoder's."""
    for scale in (0.125, 1):
        tune(tmp_path / str(scale), *overrides(model, data, f"model.encoder_lr_scale={scale}", "trainer.max_steps=1"))
    eighth, whole = weights(tmp_path / "0.125"), weights(tmp_path / "1")
    for name, before in bionemo.load(model).network.state_dict().items():
        moved = [after[f"encoder.{name}"] - before for after in (eighth, whole)]
        torch.testing.assert_close(8 * moved[0], moved[1], rtol=1e-3, atol=1e-6)
    assert all(torch.equal(eighth[name], whole[name]) for name in eighth if name.startswith("head."))
    assert any(not torch.equal(eighth[name], whole[name]) for name in eighth)


def test_fine_tuning_starts_from_a_head_trained_on_the_frozen_model(model: Path, data: Path, tmp_path: Path) -> None:
    """A step with learning rate 1e-12 keeps the metrics of the head; the head of another task is rejected."""
    given = overrides(model, data, "model.seq_length=1024")
    tune(tmp_path / "frozen", *given, "model.encoder_frozen=True")
    head = f"model.restore_head_path={tmp_path}/frozen/head.safetensors"
    still = [
        "trainer.max_steps=1",
        "trainer.val_check_interval=1",
        "model.finetuning_optim.lr=1e-12",
        "model.finetuning_optim.sched.min_lr=0",
    ]
    tune(tmp_path / "whole", *given, head, *still)
    reports = [json.loads((tmp_path / each / "report.json").read_text()) for each in ("frozen", "whole")]
    for figure in ("val_loss", "test_loss", "test_accuracy"):
        assert reports[1][figure] == pytest.approx(reports[0][figure], rel=1e-4)
    status, console = run(tmp_path / "other", *given, head, "model.downstream_task.cnn_dim=16", model="task")
    assert (status, len(console)) == (1, 1)
    assert "model.restore_head_path=" in console[0]


def test_lora_changes_only_the_adapters_and_the_head(tuned: Callable[[str], Path], model: Path) -> None:
    """The exported model has merged adapters: the head on its embeddings reproduces the report."""
    directory = tuned("lora")
    before, after = bionemo.load(model).network.state_dict(), weights(directory)
    assert all(torch.equal(after[f"encoder.{name}"], tensor) for name, tensor in before.items())
    report = json.loads((directory / "report.json").read_text())
    adapters = sum(tensor.numel() for name, tensor in after.items() if ".adapter." in name)
    widths = [32 + 96, 32 + 32, 32 + 96, 96 + 32]  # input and output sizes of the adapted layers
    assert adapters == 2 * 2 * sum(widths) == report["trainable_parameters"] - report["head_parameters"]
    assert report["test_accuracy"] > 70

    head = TokenHead(32, 3)
    head.load_state_dict(load_file(directory / "head.safetensors"))
    rows = [line.split(",") for line in (_data(directory) / "test" / "x000.csv").read_text().split()[1:]]
    merged = bionemo.load(next(directory.glob("checkpoints/*.nemo")))
    vectors = merged.hidden_states([row[1] for row in rows])
    with torch.no_grad():
        predictions = head(torch.cat(vectors), [len(each) for each in vectors])
    in_loss = torch.tensor([digit == "1" for row in rows for digit in row[3]])
    targets = torch.tensor(["CEH".index(label) for row in rows for label in row[2]])
    loss = torch.nn.functional.cross_entropy(predictions[in_loss], targets[in_loss])
    assert float(loss) == pytest.approx(report["test_loss"], rel=1e-4)


def _data(directory: Path) -> Path:
    (line,) = [each for each in (directory / "cmd-args.log").read_text().split() if "dataset_path" in each]
    return Path(line.partition("=")[2])


LAYOUTS = {
    "data": ["model.micro_batch_size=5"],
    "data, sharded": ["model.micro_batch_size=5", "model.finetuning_optim.name=distributed_fused_adam"],
    "tensor": ["model.tensor_model_parallel_size=2"],
    "tensor and sequence": ["model.tensor_model_parallel_size=2", "model.sequence_parallel=True"],
}


WAYS = {"whole": [], "lora": [*LORA, EVERYWHERE]}
ALWAYS = [("lora", "tensor and sequence")]  # the others are marked slow


@pytest.mark.parametrize(
    ("way", "layout"),
    [
        pytest.param(
            WAYS[way], layout, id=f"{way}-{layout}", marks=[] if (way, layout) in ALWAYS else pytest.mark.slow
        )
        for way in WAYS
        for layout in LAYOUTS
    ],
)
def test_parallel_layouts_agree(way: list[str], layout: str, model: Path, data: Path, tmp_path: Path) -> None:
    name = "fused_adam" if "sharded" in layout else "adam"  # decoupled weight decay, like the sharded optimizer
    given = overrides(model, data, *way, "trainer.max_epochs=1", f"model.finetuning_optim.name={name}")
    tune(tmp_path / "one", *given)
    ended = run_on_ranks(tmp_path / "two", *given, *LAYOUTS[layout], ranks=2, model="task")
    assert [status for status, _ in ended] == [0, 0], ended
    for key in ("reduced_train_loss", "grad_norm", "val_loss"):
        one, two = logged(tmp_path / "one", key), logged(tmp_path / "two", key)
        assert list(one) == list(two)
        assert list(two.values()) == pytest.approx(list(one.values()), rel=1e-4), key
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert one.keys() == two.keys()
    for key, tensor in one.items():
        assert (two[key] - tensor).abs().max() <= 1e-2 * 6 * 0.01 + 1e-5, key
    reports = [json.loads((tmp_path / each / "report.json").read_text()) for each in ("one", "two")]
    assert reports[1]["test_loss"] == pytest.approx(reports[0]["test_loss"], rel=1e-3)
    assert reports[1]["trainable_parameters"] == reports[0]["trainable_parameters"]


def test_an_interrupted_run_is_resumed(model: Path, data: Path, tmp_path: Path) -> None:
    """A run interrupted in its second epoch and resumed has the weights and metrics of an uninterrupted run."""
    given = overrides(model, data, *LORA, "trainer.max_epochs=2")
    tune(tmp_path / "whole", *given)
    status, console = run(tmp_path / "two", *given, "trainer.limit_train_batches=7", model="task")
    assert status == 0, console
    tune(tmp_path / "two", *given)
    one, two = weights(tmp_path / "whole"), weights(tmp_path / "two")
    assert all(torch.equal(two[name], tensor) for name, tensor in one.items())
    reports = [json.loads((tmp_path / each / "report.json").read_text()) for each in ("whole", "two")]
    assert [epoch["val_loss"] for epoch in reports[1]["epochs"]][-1] == reports[0]["epochs"][-1]["val_loss"]
    assert reports[1]["test_loss"] == reports[0]["test_loss"]


def test_a_run_without_a_validation_before_its_end(model: Path, data: Path, tmp_path: Path) -> None:
    """It is validated after its last step; without validations, head and adapter are those of the last step."""
    given = overrides(model, data, *LORA, "trainer.max_epochs=1")

    def check_head(run: Path, encoder: Path) -> None:
        head = read_trained_head(run / "head.safetensors")
        check_encoder(head, encoder, bionemo.load(encoder, "cpu").weights_checksum)

    console = tune(tmp_path / "late", *given, "trainer.val_check_interval=100")
    assert "note: trainer.val_check_interval=100: the run has" in "\n".join(console)
    assert json.loads((tmp_path / "late" / "report.json").read_text())["val_loss"] > 0
    saving = "exp_manager.checkpoint_callback_params.every_n_train_steps=2"
    tune(tmp_path / "never", *given, "trainer.limit_val_batches=0", saving)
    for name in ("late", "never"):
        assert (tmp_path / name / "adapter" / "adapter_model.safetensors").exists()
        check_head(tmp_path / name, tmp_path / name)
    tune(tmp_path / "none", *given, "exp_manager.create_checkpoint_callback=False")
    with pytest.raises(UserError, match="the run that trained the head wrote no checkpoint of its model"):
        check_head(tmp_path / "none", model)


def test_a_run_is_not_resumed_with_another_model(model: Path, data: Path, tmp_path: Path) -> None:
    """The path of the model is the same."""
    shutil.copytree(model, tmp_path / "model")
    given = overrides(tmp_path / "model", data, *LORA, "trainer.max_epochs=1")
    tune(tmp_path / "run", *given)
    for name in ("head.safetensors", "test_predictions.csv", "report.json", "report.png", "report.svg"):
        (tmp_path / "run" / name).unlink()
    shutil.rmtree(tmp_path / "run" / "adapter")
    changed = load_file(tmp_path / "model" / "model.safetensors")
    changed["esm.embeddings.word_embeddings.weight"][5] += 1e-3
    save_file(changed, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    status, console = run(tmp_path / "run", *given, "trainer.max_epochs=2", model="task")
    assert status == 1
    assert "has checkpoints of a run with another pretrained model, other labels or another head" in console[-1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["model.encoder_frozen=True", "model.peft.enabled=True"], "no effect on a frozen encoder"),
        (["model.encoder_frozen=True", "model.freeze_layers=1"], "no effect on a frozen encoder"),
        (["model.freeze_layers=1", "model.peft.enabled=True"], "remove one of the two"),
        (["model.encoder_lr_scale=0.1", "model.encoder_frozen=True"], "no effect on a frozen encoder"),
        (["model.encoder_lr_scale=0.1", "model.peft.enabled=True"], "only adapters are trained: remove it"),
        (["model.restore_head_path=x", "model.encoder_frozen=True"], "no effect on a frozen encoder"),
        (["model.restore_head_path=none/head.safetensors"], "none/head.safetensors cannot be read"),
        (["model.encoder_lr_scale=0"], "expected above 0"),
        (["model.freeze_layers=3"], "model.freeze_layers=3: the model has 2 layers"),
        (["model.peft.enabled=True", "model.peft.lora_tuning.adapter_dim=0"], "adapter_dim is 0, expected at least 1"),
        (["model.peft.enabled=True", "model.peft.lora_tuning.target_modules=[qkv]"], "attention_qkv"),
        (["model.pipeline_model_parallel_size=2"], "set it to 1"),
        (["model.tensor_model_parallel_size=3"], "model.num_attention_heads=4 is not divisible"),
        (["model.restore_encoder_path=none"], "none: there is no such checkpoint"),
        (["model.finetuning_optim.sched.warmup_ratio=0.1"], "warmup"),
        (["trainer.max_epochs=null"], "set trainer.max_epochs or trainer.max_steps"),
        (["trainer.max_epochs=-1"], "set trainer.max_epochs or trainer.max_steps"),
        (["model.data.dataset.val=x001"], "x001.csv"),
    ],
)
def test_mistakes(more: list[str], message: str, model: Path, data: Path, tmp_path: Path) -> None:
    status, console = run(tmp_path / "run", *overrides(model, data, *more), model="task")
    assert status == 1
    assert len(console) == 1
    assert console[0].startswith("error: ")
    assert message in console[0]
    assert not (tmp_path / "run").exists()

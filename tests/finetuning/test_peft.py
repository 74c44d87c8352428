# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning continues an adapter of peft exactly, and writes one that peft reads."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import bionemo
from bionemo.checkpoint import TensorSource, tools
from bionemo.checkpoint.merged_lora import DOWN, UP
from bionemo.formats.convert import convert, open_model
from bionemo.formats.huggingface.adapter import MergedAdapter, write_adapter
from tests.formats.test_adapter import CASES
from tests.support.adapters import adapt, attach
from tests.support.finetuning import written
from tests.support.runs import VOCABULARY, last_checkpoint, logged, read_weights, run, run_on_ranks

SEQUENCES = ["MKTAYIAKQR", "ACDEFGHIKLMNPQRSTVWYXBUZO" * 2]
LORA = ["model.peft.enabled=True", "model.encoder_frozen=False"]
EVERYWHERE = "model.peft.lora_tuning.target_modules=[attention_qkv,attention_dense,mlp_fc1,mlp_fc2]"
STILL = ["trainer.max_steps=1", "trainer.val_check_interval=1", "model.finetuning_optim.lr=1e-12",
         "model.finetuning_optim.sched.min_lr=0"]  # fmt: skip
# ranks differ between modules and layers, and one layer has no value
UNEVEN: dict[str, Any] = {
    "target_modules": r".*(query|key|layer\.0.*value|dense)", "r": 3, "lora_alpha": 5, "use_rslora": True,
    "rank_pattern": {r"layer\.1\.attention\.self\.query": 2, "intermediate.dense": 4}, "alpha_pattern": {"key": 7},
    "exclude_modules": ["lm_head.dense"],
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("task") / "data")


def tune(directory: Path, model: Path, data: Path, *more: str) -> list[str]:
    given = [f"model.restore_encoder_path={model}", f"model.data.dataset_path={data}", "model.micro_batch_size=10",
             "trainer.max_epochs=2", "model.finetuning_optim.lr=0.01", *LORA]  # fmt: skip
    status, console = run(directory, *given, *more, model="task")
    assert status == 0, console
    return console


def best(directory: Path) -> Path:
    return Path(json.loads((directory / "report.json").read_text())["encoder"])


def embed(model: Any, path: Path) -> list[Tensor]:
    """Return the hidden states of peft's model of an ESM-2, without begin and end."""
    found = []
    for ids in bionemo.load(path, "cpu").ids(SEQUENCES):
        tokens = torch.tensor([[0, *ids.tolist(), 2]])
        with torch.no_grad():
            found.append(model.base_model.model.esm(tokens).last_hidden_state[0, 1:-1])
    return found


def check_same_function(adapter: Path, base: Path, ours: Path) -> None:
    """Compare an adapter, as peft and we read it, with a checkpoint of ours."""
    expected = bionemo.load(ours, "cpu").hidden_states(SEQUENCES)
    for found, hidden in zip(embed(attach(base, adapter), base), expected, strict=True):
        np.testing.assert_allclose(found.numpy(), hidden, rtol=0, atol=2e-5)
    for found, hidden in zip(bionemo.load(adapter, "cpu").hidden_states(SEQUENCES), expected, strict=True):
        np.testing.assert_allclose(found, hidden, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "targets",
    [EVERYWHERE, pytest.param("model.peft.lora_tuning.target_modules=[attention_qkv]", marks=pytest.mark.slow)],
)
def test_a_run_writes_its_adapter(targets: str, model: Path, data: Path, tmp_path: Path) -> None:
    """Query, key and value share A; peft computes the function of the best checkpoint."""
    console = tune(tmp_path / "run", model, data, "model.peft.lora_tuning.adapter_dim=2", targets)
    adapter = tmp_path / "run" / "adapter"
    assert f"the adapter, in the format of peft, is in {adapter}" in console
    assert sorted(each.name for each in adapter.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * (6 if targets == EVERYWHERE else 3)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(model)
    assert (settings["r"], settings["lora_alpha"], settings["task_type"]) == (2, 2, None)
    assert settings["rank_pattern"] == settings["alpha_pattern"] == {}
    loaded: Any = attach(model, adapter)
    assert {name.replace(".default", "") for name, _ in loaded.named_parameters() if "lora_" in name} == set(tensors)
    check_same_function(adapter, model, best(tmp_path / "run"))
    before = bionemo.load(model, "cpu").embed(SEQUENCES)
    assert not np.allclose(bionemo.load(adapter, "cpu").embed(SEQUENCES), before, atol=1e-3)


class Continued(NamedTuple):
    """Two runs that continue an adapter."""

    adapter: Path
    peft: Any  # peft's model of the adapter
    still: Path  # a step with learning rate 1e-12
    note: str
    run: Path  # two epochs


@pytest.fixture(
    scope="module",
    params=[
        UNEVEN,
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"target_modules": "all-linear", "exclude_modules": ["lm_head.dense"]}, marks=pytest.mark.slow),
    ],
    ids=["uneven", "query and value", "all"],
)
def continued(
    request: pytest.FixtureRequest, model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Continued:
    path = tmp_path_factory.mktemp("continued")
    peft = adapt(path / "adapter", model, **request.param)
    (note,) = [line for line in tune(path / "still", path / "adapter", data, *STILL) if "lora_tuning" in line]
    tune(path / "run", path / "adapter", data)
    return Continued(path / "adapter", peft, path / "still", note, path / "run")


def test_training_continues_an_adapter(continued: Continued, model: Path) -> None:
    """At the first step the function is that of peft; later, peft reads what is written with the original base."""
    check_same_function(continued.still / "adapter", model, best(continued.still))
    hiddens = bionemo.load(best(continued.still), "cpu").hidden_states(SEQUENCES)
    for found, expected in zip(hiddens, embed(continued.peft, model), strict=True):
        np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=2e-5)

    written = continued.run / "adapter"
    assert json.loads((written / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model)
    check_same_function(written, model, best(continued.run))
    before = bionemo.load(continued.adapter, "cpu").embed(SEQUENCES)
    assert not np.allclose(bionemo.load(written, "cpu").embed(SEQUENCES), before, atol=1e-3)
    after = read_weights(best(continued.run))
    for name, tensor in bionemo.load(model, "cpu").network.state_dict().items():
        assert torch.equal(after[f"encoder.{name}"], tensor), name


def test_an_interrupted_run_is_resumed(continued: Continued, data: Path, tmp_path: Path) -> None:
    """It has the weights of an uninterrupted run."""
    tune(tmp_path / "two", continued.adapter, data, "trainer.limit_train_batches=7")
    tune(tmp_path / "two", continued.adapter, data)
    runs = continued.run, tmp_path / "two"
    one, two = (read_weights(last_checkpoint(path)) for path in runs)
    assert one.keys() == two.keys()
    assert all(torch.equal(two[name], tensor) for name, tensor in one.items())
    files = [(path / "adapter" / "adapter_model.safetensors").read_bytes() for path in runs]
    assert files[0] == files[1]


def shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(each.shape) for name, each in read_weights(best(directory)).items() if ".adapter." in name}


@pytest.mark.parametrize("continued", [UNEVEN], indirect=True)
def test_ranks_of_a_continued_adapter(continued: Continued, model: Path, data: Path, tmp_path: Path) -> None:
    """Ranks of query, key and value add; an adapter of ours, whose A is shared, keeps its rank."""
    assert continued.note == (
        f"note: model.peft.lora_tuning is not used: {continued.adapter} is continued with its modules and ranks "
        "(mlp.linear_fc1 4, mlp.linear_fc2 3, self_attention.linear_proj 3, self_attention.linear_qkv 5, "
        "self_attention.linear_qkv 9)"
    )
    found = shapes(continued.still)
    assert found["encoder.encoder.layers.0.self_attention.linear_qkv.adapter.down"] == (9, 32)
    assert found["encoder.encoder.layers.1.self_attention.linear_qkv.adapter.up"] == (96, 5)
    again = continued.still / "adapter"
    settings = json.loads((again / "adapter_config.json").read_text())
    assert settings["r"] == settings["lora_alpha"] == 9
    assert settings["rank_pattern"] == settings["alpha_pattern"]
    assert settings["rank_pattern"]["esm.encoder.layer.1.attention.self.value"] == 5
    tune(tmp_path / "two", again, data, *STILL)
    assert shapes(tmp_path / "two") == found
    check_same_function(again, model, best(tmp_path / "two"))


def test_equal_sizes_have_no_note(model: Path, data: Path, tmp_path: Path) -> None:
    adapt(tmp_path / "adapter", model, target_modules=["intermediate.dense"], r=4)
    sizes = ["model.peft.lora_tuning.adapter_dim=4", "model.peft.lora_tuning.target_modules=[mlp_fc1]"]
    console = tune(tmp_path / "run", tmp_path / "adapter", data, *sizes, *STILL)
    assert not any("lora_tuning" in line for line in console)


@pytest.mark.slow
def test_tensor_parallelism(model: Path, data: Path, tmp_path: Path) -> None:
    adapt(tmp_path / "adapter", model, **UNEVEN)
    tune(tmp_path / "one", tmp_path / "adapter", data, "trainer.max_epochs=1")
    given = [f"model.restore_encoder_path={tmp_path}/adapter", f"model.data.dataset_path={data}", *LORA,
             "model.micro_batch_size=10", "trainer.max_epochs=1", "model.finetuning_optim.lr=0.01",
             "model.tensor_model_parallel_size=2", "model.sequence_parallel=True"]  # fmt: skip
    ended = run_on_ranks(tmp_path / "two", *given, ranks=2, model="task")
    assert [status for status, _ in ended] == [0, 0], ended
    losses = [list(logged(tmp_path / name, "reduced_train_loss").values()) for name in ("one", "two")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    check_same_function(tmp_path / "two" / "adapter", model, best(tmp_path / "two"))


@pytest.mark.slow
def test_without_lora_an_adapter_is_merged(model: Path, data: Path, tmp_path: Path) -> None:
    adapt(tmp_path / "adapter", model, target_modules="all-linear")
    tune(tmp_path / "run", tmp_path / "adapter", data, "model.peft.enabled=False", *STILL)
    expected = bionemo.load(tmp_path / "adapter", "cpu").embed(SEQUENCES)
    np.testing.assert_allclose(bionemo.load(best(tmp_path / "run"), "cpu").embed(SEQUENCES), expected, atol=1e-5)
    assert not (tmp_path / "run" / "adapter").exists()


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"target_modules": ["query", "lm_head.dense"]}, "'lm_head.dense.weight'"),
        ({"modules_to_save": ["lm_head"]}, "'lm_head.bias', 'lm_head.dense.bias', 'lm_head.dense.weight', ..."),
    ],
)
def test_what_is_not_continued(settings: dict[str, Any], name: str, model: Path, data: Path, tmp_path: Path) -> None:
    adapt(tmp_path / "adapter", model, **settings)
    given = [f"model.restore_encoder_path={tmp_path}/adapter", f"model.data.dataset_path={data}", *LORA]
    status, console = run(tmp_path / "run", *given, "trainer.max_epochs=1", model="task")
    assert (status, len(console)) == (1, 1), console
    assert f"adapter changes {name}, which is not trained here: merge it first with bionemo checkpoint" in console[0]
    assert not (tmp_path / "run").exists()


def test_untrained_matrices_elsewhere_are_left_out(model: Path, data: Path, tmp_path: Path) -> None:
    """peft's "all-linear" includes the head and the contact head, which a classifier does not train."""
    adapt(tmp_path / "adapter", model, target_modules="all-linear", init_lora_weights=True)
    tune(tmp_path / "run", tmp_path / "adapter", data, *STILL)
    tensors = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 6
    assert all(".encoder.layer." in name for name in tensors)


def test_another_adapter_is_not_replaced(model: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    adapt(tmp_path / "run" / "adapter", model)
    given = [f"model.restore_encoder_path={model}", f"model.data.dataset_path={data}", *LORA, "trainer.max_epochs=1"]
    status, console = run(tmp_path / "run", *given, model="task")
    assert status == 1
    assert "adapter belongs to another run and would be replaced" in console[-1]


def joined(weights: TensorSource, adapter: dict[str, Tensor], name: str) -> Tensor:
    """Return W + U D."""
    weight, module = weights.read(name), name.removesuffix("weight")
    return weight + adapter[module + UP] @ adapter[module + DOWN] if module + UP in adapter else weight


@pytest.mark.parametrize("case", ["patterns", "esmc", "gpt2", "corrected", "megatron bert", "blenderbot"])
def test_matrices_of_all_families(case: str, tmp_path: Path) -> None:
    """W + U D equals the merged weight, and the matrices are those of peft again when they are written."""
    write, settings = CASES[case]
    kind = write(tmp_path / "base")
    excluded = {"exclude_modules": ["lm_head.dense", "transform.dense"]}  # of the head, which is not continued
    adapt(tmp_path / "adapter", tmp_path / "base", kind, **settings, **excluded)
    merged = open_model(tmp_path / "adapter").weights
    assert isinstance(merged, MergedAdapter)
    adapter = merged.separate(r".*\.layers\.\d+\..*")
    names = [name for name in merged.shapes("weights") if not torch.equal(merged.read(name), merged.base.read(name))]
    assert {name.removesuffix("weight") + UP for name in names} == {name for name in adapter if name.endswith(UP)}
    for name in merged.shapes("weights"):
        torch.testing.assert_close(joined(merged.base, adapter, name), merged.read(name), rtol=0, atol=1e-6)

    model = open_model(tmp_path / "base")
    weights = {**dict(tools.iterate_weights(model.weights)), **adapter}
    state = {
        "config": dict(model.config),
        "model": {"model._target_": model.config["_target_"], "words": model.vocab_size},
    }
    tools.write_weights(tmp_path / "tuned", state, ((f"encoder.{name}", each) for name, each in weights.items()))
    assert write_adapter(tmp_path / "again", tmp_path / "tuned", str(tmp_path / "base"))
    again = PeftModel.from_pretrained(kind.from_pretrained(tmp_path / "base"), tmp_path / "again")
    first = PeftModel.from_pretrained(kind.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    one, two = (each.merge_and_unload().state_dict() for each in (first, again))  # type: ignore[operator]
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("config", [{"_target_": "mine.Model"}, {"_target_": "bionemo.models.esm2nv.ESM2nv"}])
def test_nothing_is_written(config: dict[str, str], tmp_path: Path) -> None:
    """Of a model without a Hugging Face format, or a checkpoint without adapters."""
    kind = UP if config["_target_"].startswith("mine") else "weight"
    weights = [(f"encoder.encoder.layers.0.mlp.linear_fc1.{kind}", torch.ones(2, 2))]
    tools.write_weights(tmp_path / "tuned", {"config": config, "model": {}}, iter(weights))
    assert not write_adapter(tmp_path / "adapter", tmp_path / "tuned", "base")
    assert not (tmp_path / "adapter").exists()


@pytest.mark.slow
def test_gpt2(tmp_path: Path) -> None:
    """Its block is called decoder, and its matrices are stored as [in, out]."""
    torch.manual_seed(0)
    words = len(json.loads((VOCABULARY / "vocab.json").read_text()))
    sizes: dict[str, Any] = {"vocab_size": words, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.1)).save_pretrained(tmp_path / "base")
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(VOCABULARY / name, tmp_path / "base")
    targets: dict[str, Any] = {"target_modules": ["c_attn", "c_fc", "attn.c_proj"], "fan_in_fan_out": True, "r": 2}
    first: Any = adapt(tmp_path / "adapter", tmp_path / "base", GPT2LMHeadModel, **targets)
    for split in ("train", "val", "test"):
        (tmp_path / "data" / split).mkdir(parents=True)
        rows = ["id,sequence,label", *(f"{number},{'the cat' * number},{'xy'[number % 2]}" for number in range(1, 9))]
        (tmp_path / "data" / split / "x000.csv").write_text("\n".join(rows) + "\n")
    columns = ["model.data.task_type=classification", "model.data.target_column=label", "model.data.mask_column=null"]
    tune(tmp_path / "run", tmp_path / "adapter", tmp_path / "data", *columns, "model.micro_batch_size=4", *STILL)
    again: Any = attach(tmp_path / "base", tmp_path / "run" / "adapter", GPT2LMHeadModel)
    with torch.no_grad():
        one, two = (each(torch.tensor([[1, 5, 7, 9, 30]])).logits for each in (first, again))
    torch.testing.assert_close(two, one, rtol=0, atol=1e-5)


def test_a_run_as_base(model: Path, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The base of the adapter is the checkpoint that was used; a conversion of the result leaves out the head."""
    base = tmp_path / "pretrained" / "checkpoints" / "step=0-last"
    base.parent.mkdir(parents=True)
    convert(model, base)
    tune(tmp_path / "run", tmp_path / "pretrained", data, *STILL)
    adapter = tmp_path / "run" / "adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    check_same_function(adapter, model, best(tmp_path / "run"))
    assert "prediction head" not in caplog.text
    targets: list[tuple[str, str | None]] = [("hf", "hf"), ("x.nemo", None)]
    for name, to in targets:
        caplog.clear()
        convert(tmp_path / "run", tmp_path / name, to)
        assert caplog.text.count("its prediction head is left out; head.safetensors of the run holds it") == 1

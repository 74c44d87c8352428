# SPDX-License-Identifier: Apache-2.0
"""Round trips of `.nemo` archives, merging of ranks, and reading with NeMo."""

import os
import re
import resource
import signal
import tarfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.formats.nemo_archive import read, write
from bionemo.formats.nemo_models import get_nemo_model
from bionemo.models.esm1nv import ESM1nv
from bionemo.models.esm2nv import ESM2nv
from bionemo.models.language_model import load_model_class
from bionemo.tokenizers import load_tokenizer
from tests.conftest import EXAMPLES
from tests.formats.archives import (
    FORK,
    TARGETS,
    archive,
    as_yaml,
    entry,
    nemo_state,
    same,
    saved,
    some_weights,
    tar,
    tiny,
)

CONFIGS = {"esm1nv": "pretrain_small", "esm2nv": "pretrain_esm2_8M"}

# From the converter of v1.10 and the modules of NeMo 1.23; layer 0 stands for all.
V1_NAMES = {
    "language_model.embedding.word_embeddings.weight",
    "language_model.encoder.final_layernorm.weight",
    "language_model.encoder.final_layernorm.bias",
    "lm_head.bias",
    "lm_head.dense.weight",
    "lm_head.dense.bias",
    "lm_head.layernorm.weight",
    "lm_head.layernorm.bias",
} | {
    f"language_model.encoder.layers.0.{module}.{kind}"
    for kind in ("weight", "bias")
    for module in (
        "input_layernorm",
        "self_attention.query_key_value",
        "self_attention.dense",
        "post_attention_layernorm",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
    )
}
ALSO = {
    "esm1nv": "language_model.embedding.position_embeddings.weight",
    "esm2nv": "language_model.rotary_pos_emb.inv_freq",
}
# Megatron splits the input dimension of the first and the output dimension of the second set, and nothing else.
ROWS = re.compile(r"(query_key_value|dense_h_to_4h)\.|word_embeddings\.weight|lm_head\.bias")
COLUMNS = re.compile(r"(self_attention\.dense|dense_4h_to_h)\.weight")


@pytest.mark.parametrize("name", CONFIGS)
def test_weight_table_matches_the_model(name: str) -> None:
    cfg = load(CONFIGS[name], [], EXAMPLES / name / "conf").model
    alphabet = load_tokenizer(name)
    with torch.device("meta"):
        model = load_model_class(cfg._target_)(cfg, alphabet)
    names = get_nemo_model(asdict(cfg))
    shapes = {key: weight.shape for key, weight in names.weights(asdict(cfg)).items()}
    assert shapes == {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert (names.our_class, names.nemo_class, names.vocab_size) == (
        cfg._target_,
        TARGETS[name],
        alphabet.vocab_size,
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_written_names_and_round_trip(name: str, tmp_path: Path) -> None:
    cfg = asdict(load(CONFIGS[name], ["model.num_layers=1", "model.hidden_size=240"], EXAMPLES / name / "conf").model)
    weights = some_weights(cfg)
    weights["lm_head.dense.weight"] = weights["lm_head.dense.weight"].bfloat16()
    weights["lm_head.dense.bias"] = weights["lm_head.dense.bias"].half()
    file = tmp_path / "new" / "model.nemo"
    write(file, cfg, {key: nn.Parameter(weight) for key, weight in weights.items()})

    with tarfile.open(file, "r:") as opened:
        assert opened.getnames() == ["./model_config.yaml", "./model_weights.ckpt"]
        config = yaml.safe_load(opened.extractfile("./model_config.yaml"))
        state = torch.load(opened.extractfile("./model_weights.ckpt"), weights_only=True)
    assert set(state) == {f"model.{key}" for key in V1_NAMES | {ALSO[name]}}
    assert config["target"] == TARGETS[name]
    assert "_target_" not in config  # NeMo would instantiate it with Hydra
    written = cfg.keys() - {"_target_", "tokenizer", "rotary_frequencies"}  # the latter only if it is set
    assert {key: cfg[key] for key in written}.items() <= config.items()
    if name == "esm2nv":
        head = cfg["hidden_size"] // cfg["num_attention_heads"]
        expected = [10000.0 ** (-i / head) for i in range(0, head, 2)]
        torch.testing.assert_close(state[f"model.{ALSO[name]}"], torch.tensor(expected))

    found = read(file)
    assert same(found.weights, weights)
    assert found.config == config
    assert os.listdir(file.parent) == [file.name]


def test_equal_weights_give_equal_files(tmp_path: Path) -> None:
    config, weights = tiny(), some_weights(tiny())
    table = torch.cat([weights["word_embeddings.weight"], torch.zeros(1000, 8)])
    write(tmp_path / "a", config, weights)
    write(tmp_path / "b", config, weights | {"word_embeddings.weight": table[:128]})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def part(name: str, whole: Tensor, rank: int, ranks: int, rows: int) -> Tensor:
    """Return the part of a tensor rank."""
    if name.endswith(("word_embeddings.weight", "lm_head.bias")):
        whole = torch.cat([whole, torch.full((rows - len(whole), *whole.shape[1:]), 7.0)])
    if COLUMNS.search(name):
        return whole.chunk(ranks, 1)[rank].clone()
    return whole.chunk(ranks, 0)[rank].clone() if ROWS.search(name) else whole


def divided(state: dict[str, Tensor], config: dict[str, Any], tp: int, pp: int) -> dict[str, dict[str, Any]]:
    """Return the state dict of every rank, by directory."""
    layers, multiple = config["num_layers"], tp * config["make_vocab_size_divisible_by"]
    rows = -(-30 // multiple) * multiple  # v1 padded the vocabulary so that it divides evenly among ranks
    folders = {}
    for rank in range(tp):
        for stage in range(pp):
            folder = f"tp_rank_{rank:02d}_pp_rank_{stage:03d}" if pp > 1 else f"mp_rank_{rank:02d}"
            held: dict[str, Any] = {}
            for name, whole in state.items():
                layer = re.search(r"layers\.(\d+)\.", name)
                first = stage * layers // pp
                if layer and first <= int(layer[1]) < first + layers // pp:
                    local = name.replace(layer[0], f"layers.{int(layer[1]) - first}.")
                    held[local] = part(name, whole, rank, tp, rows)
                elif not layer and stage == (0 if "embedding." in name else pp - 1):
                    held[name] = part(name, whole, rank, tp, rows)
            if stage == pp - 1 > 0:
                table = "model.language_model.embedding.word_embeddings.weight"
                held["model.word_embeddings.weight"] = part(table, state[table], rank, tp, rows)
            held["model.language_model.rotary_pos_emb.inv_freq"] = torch.ones(2)
            held["model.language_model.encoder.layers.0.mlp.dense_h_to_4h._extra_state"] = None
            folders[folder] = held
    return folders


def as_nemo_packs(directory: Path, file: Path, mode: str) -> Path:
    """Pack a directory like NeMo, with a member "." and extended headers that hold the time."""
    with tarfile.open(file, mode) as packed:
        packed.add(directory, arcname=".")
    return file


@pytest.mark.parametrize(("multiple", "mode"), [(128, "w:"), (16, "w:gz"), (10, "w:")])
@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 2), (2, 2), (2, 4)], ids="tp{0[0]}-pp{0[1]}".format)
def test_ranks_are_merged(layout: tuple[int, int], multiple: int, mode: str, tmp_path: Path) -> None:
    tp, pp = layout
    config = tiny("esm1nv", 4, multiple)
    weights = some_weights(config)
    state = nemo_state(config, weights)
    source = tmp_path / "source"
    source.mkdir()
    (source / "model_config.yaml").write_bytes(as_yaml(config | {"tensor_model_parallel_size": tp}))
    (source / "0123abcd_tokenizer.model").write_bytes(b"\n\x07")
    if layout == (1, 1):
        torch.save({"state_dict": {k.replace("model.", "model.module.", 1): v for k, v in state.items()}},
                   source / "model_weights.ckpt")  # fmt: skip
    else:
        for folder, held in divided(state, config, tp, pp).items():
            (source / folder).mkdir()
            torch.save(held, source / folder / "model_weights.ckpt")
    assert same(read(as_nemo_packs(source, tmp_path / "v1.nemo", mode)).weights, weights)


def make_inconsistent(kind: str, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the state dicts of 2 x 2 ranks of which one is inconsistent."""
    folders = divided(nemo_state(config, some_weights(config)), config, 2, 2)
    last = folders["tp_rank_01_pp_rank_001"]
    if kind == "rank":
        del folders["tp_rank_01_pp_rank_001"]
    elif kind == "missing":
        del last["model.lm_head.dense.bias"]
    elif kind == "replica":
        last["model.lm_head.dense.bias"] = last["model.lm_head.dense.bias"] + 1
    elif kind == "table":
        folders["tp_rank_00_pp_rank_001"]["model.word_embeddings.weight"][3] += 1
    elif kind == "width":
        name = "model.language_model.encoder.layers.1.self_attention.dense.weight"
        last[name] = last[name][:, 1:].contiguous()
    elif kind == "height":
        name = "model.language_model.encoder.layers.1.self_attention.dense.weight"
        last[name] = last[name][1:].contiguous()
    elif kind == "type":
        last["model.lm_head.bias"] = last["model.lm_head.bias"].half()
    return folders


@pytest.mark.parametrize(
    ("kind", "message"),
    {
        "rank": "it contains no model_weights.ckpt, or not one for each rank",
        "missing": "its tensor parallel ranks do not hold the same weights",
        "replica": "its tensor parallel ranks differ in lm_head.dense.bias",
        "table": "its pipeline stages differ in word_embeddings.weight",
        "width": "encoder.layers.3.self_attention.linear_proj.weight has shape (8, 7), expected (8, 8) from",
        "height": "the parts of encoder.layers.3.self_attention.linear_proj.weight have incompatible shapes",
        "type": "the parts of lm_head.bias have incompatible shapes",
    }.items(),
)
def test_inconsistent_ranks_are_refused(kind: str, message: str, tmp_path: Path) -> None:
    config = tiny("esm2nv", 4)
    members = [entry(f"./{d}/model_weights.ckpt", saved(held)) for d, held in make_inconsistent(kind, config).items()]
    file = tar(tmp_path / "x.nemo", [entry("./model_config.yaml", as_yaml(config)), *members])
    with pytest.raises(UserError, match=re.escape(f"{file} cannot be opened: {message}")):
        read(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "bionemo.model.dna.DNABERTModel"}, "supported: ESM1nvModel, ESM2nvModel, MegatronGPTModel, Meg"),
        ({"megatron_legacy": True}, "megatron_legacy in its configuration is 'True'; only False is supported"),
        ({"normalization": "layernorm1p"}, "normalization in its configuration is 'layernorm1p'; only layernorm"),
        ({"num_layers": 3}, "12 weights are missing: 'encoder.layers.2.input_layernorm.weight'"),
        (
            {"num_layers": 1},
            "12 weights are unknown: 'model.language_model.encoder.layers.1.input_layernorm.weight'",
        ),
        ({"hidden_size": 16}, "word_embeddings.weight has shape (128, 8), expected (128, 16)"),
        ({"target": TARGETS["esm2nv"]}, "1 weights are unknown: 'model.language_model.embedding.position_embeddin"),
        ({"hidden_size": None}, "hidden_size in its configuration is not an integer from 1 to 1048576"),
    ],
)
def test_configurations_that_do_not_match_the_weights(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = tiny("esm1nv", 2)
    weights = saved(nemo_state(config, some_weights(config)))
    with pytest.raises(UserError, match=re.escape(message)):
        read(archive(tmp_path / "x.nemo", as_yaml(config | change), weights))


def test_configuration_values_are_not_evaluated(tmp_path: Path) -> None:
    config = tiny() | {
        "where": "${oc.env:HOME}",
        "lr": 2e-4,
        "none": None,
        "list": [1, {"a": True}],
    }
    weights = saved(nemo_state(config, some_weights(config)))
    assert read(archive(tmp_path / "x.nemo", as_yaml(config), weights)).config == config


@pytest.mark.parametrize("target", ["", "bionemo.model.protein.esm1nv.base.ESMnvMegatronBertModel"])
def test_position_type_determines_the_model_without_a_class(target: str) -> None:
    assert get_nemo_model({"target": target, "position_embedding_type": "rope"}) is ESM2nv.nemo
    assert get_nemo_model({"target": target, "position_embedding_type": "learned_absolute"}) is ESM1nv.nemo
    assert get_nemo_model({}) is ESM1nv.nemo


def write_with_room_for(size: int, file: Path, weights: dict[str, Tensor]) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    try:
        write(file, tiny(), weights)
    except UserError as error:
        os._exit(0 if str(error).startswith(f"{file} could not be written (File too large)") else 2)
    os._exit(1)


@pytest.mark.parametrize("size", [0, 700, 5_000, 20_000])
def test_full_disk_keeps_existing_files(size: int, tmp_path: Path) -> None:
    file, weights = tmp_path / "model.nemo", some_weights(tiny())
    write(file, tiny(), weights)
    before = file.read_bytes()
    assert len(before) > 21_000
    writer = FORK.Process(target=write_with_room_for, args=(size, file, some_weights(tiny(), seed=1)))
    writer.start()
    writer.join()
    assert writer.exitcode == 0
    assert os.listdir(tmp_path) == [file.name]
    assert file.read_bytes() == before


def test_weights_that_do_not_match_the_configuration_are_not_written(tmp_path: Path) -> None:
    weights = some_weights(tiny())
    weights.pop("lm_head.bias")
    with pytest.raises(UserError, match=r"cannot be written: 1 weights are missing: 'lm_head\.bias'"):
        write(tmp_path / "x.nemo", tiny(), weights)
    with pytest.raises(UserError, match="could not be written"):
        write("/proc/none/x.nemo", tiny(), some_weights(tiny()))
    assert not os.listdir(tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "none", Path("/dev/null")):
        with pytest.raises(UserError, match="cannot be opened: the file does not exist"):
            read(file)


def tree(state: dict[str, Tensor]) -> nn.Module:
    """Return modules with these parameters, which accept no state dict of other names or shapes."""
    root = nn.Module()
    for name, value in state.items():
        *path, last = name.split(".")
        module = root
        for step in path:
            if step not in module._modules:
                module.add_module(step, nn.Module())
            module = module._modules[step]  # type: ignore[assignment]
        module.register_buffer(last, torch.zeros_like(value))
    return root


@pytest.mark.skipif(not hasattr(tarfile, "data_filter"), reason="NeMo itself needs a later Python 3.11 to open any")
@pytest.mark.parametrize("name", CONFIGS)
def test_nemo_opens_written_archives(name: str, tmp_path: Path) -> None:
    from tests.support.nemo import ModelPT, SaveRestoreConnector

    config, weights = tiny(name, 2), some_weights(tiny(name, 2))
    state = nemo_state(config, weights)
    file = tmp_path / "ours.nemo"
    write(file, config, weights)

    # What v1's class would do. NeMo 3 itself refuses to import a class of v1, whoever wrote the archive, hence the
    # configuration given from outside, as v1 does too.
    class Model(ModelPT):
        def __init__(self, cfg: Any, trainer: Any = None) -> None:
            super().__init__(cfg, trainer)
            self.model = tree(state).model

        def setup_training_data(self, cfg: Any) -> None: ...
        def setup_validation_data(self, cfg: Any) -> None: ...
        def list_available_models(self) -> None: ...

    connector = SaveRestoreConnector()
    conf = connector.load_config_and_state_dict(Model, str(file), return_config=True)
    assert conf.target == TARGETS[name]
    assert conf.hidden_size == config["hidden_size"]
    outside = {key: value for key, value in conf.items() if key != "target"}
    from omegaconf import OmegaConf

    model = connector.restore_from(Model, str(file), OmegaConf.create(outside), torch.device("cpu"), strict=True)
    assert same(model.state_dict(), state)
    _, _, found = connector.load_config_and_state_dict(
        Model, str(file), OmegaConf.create(outside), torch.device("cpu")
    )
    assert same(found, state)

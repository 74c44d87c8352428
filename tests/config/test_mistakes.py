# SPDX-License-Identifier: Apache-2.0
"""Every user error is reported in one line that says how to correct it."""

import os
import re

import pytest

from bionemo.common.errors import UserError
from bionemo.config import check
from bionemo.config.compose import compose_typed, expand_sweep, load, rewrite_overrides
from bionemo.config.hints import did_you_mean
from bionemo.config.paths import find_config_dir, find_source
from bionemo.tokenizers.alphabet import SENTINEL_COUNT
from tests.conftest import EXAMPLES, ROOT

HOME = EXAMPLES / "esm1nv" / "conf"

MISTAKES = {
    # keys
    "model.hiden_size=3": r"unknown key model.hiden_size (did you mean model.hidden_size?)",
    "++model.hiden_size=3": r"unknown key model.hiden_size (did you mean model.hidden_size?)",
    "+trainer.max_step=3": r"unknown key trainer.max_step (did you mean trainer.max_steps?)",
    "modle.hidden_size=3": r"unknown key modle.hidden_size (did you mean model.hidden_size?)",
    "trainer.hidden_size=3": r"unknown key trainer.hidden_size (did you mean model.hidden_size?)",
    "hidden_size=3": r"unknown key hidden_size (did you mean model.hidden_size?)",
    "modle=esm2nv_8M": r"unknown key modle (did you mean model?)",
    "seed=3": r"seed=3 would have no effect (did you mean model.seed?)",
    "optim.lr=3": r"unknown key optim.lr (did you mean model.optim.lr?)",
    "model.data.train.uf90.datset.uf90_csvs=x": r"(did you mean model.data.train.uf90.dataset.uf90_csvs?)",
    "exp_manager.wandb_logger_kwargs.projet=x": r"(did you mean exp_manager.wandb_logger_kwargs.project?)",
    "trainer={max_step: 3}": r"unknown key trainer.max_step (did you mean trainer.max_steps?)",
    "zzz.qqq=3": r"unknown key zzz.qqq",
    "++model.data.preprocessing.sorce=x": r"unknown key model.data.preprocessing.sorce (did you mean",
    "~model.seed": r"missing value: give model.seed=...",
    "~model.sed": r"'model.sed' does not exist",
    # values
    "model.num_layers=abc": r"model.num_layers is 'abc', expected int",
    "model.num_layers=3.5": r"model.num_layers is 3.5, expected int",
    "model.num_layers=null": r"model.num_layers is null, expected int",
    "model.num_layers=[1,2]": r"model.num_layers is [1, 2], expected int",
    "model.num_layers=": r"model.num_layers is '', expected int",
    "model.num_layers=1,2": r"has several values: add --multirun",
    "model.hidden_size.x=1": r"model.hidden_size is {'x': 1}, expected int",
    "model.kv_channels=a": r"model.kv_channels is 'a', expected int or null",
    "model.hidden_dropout=True": r"model.hidden_dropout is True, expected float",
    "model.compile=2": r"model.compile is 2, expected bool",
    "trainer.limit_val_batches=all": r"is 'all', expected int or float",
    "trainer.devices={a: 1}": r"is {'a': 1}, expected int or str or a list of int",
    "model.optim.betas=0.9": r"model.optim.betas is 0.9, expected a list of float",
    "model.optim.betas=[0.9,x]": r"model.optim.betas is [0.9, 'x'], expected a list of float",
    "exp_manager.summary_writer_kwargs=3": r"is 3, expected a group of keys or null",
    "trainer.precision=bf16_mixed": r"(did you mean bf16-mixed?)",
    "model.data.long_sequences=cropp": r"expected one of crop, truncate, drop, error (did you mean crop?)",
    "model.data.data_impl=csv_map": r"(did you mean csv_mmap?)",
    "model.optim.name=fused_adm": r"(did you mean fused_adam?)",
    "model.optim.sched.name=CosineAnealing": r"(did you mean CosineAnnealing?)",
    # groups
    "model=esm2nv_650MM": r"no model 'esm2nv_650MM' (did you mean esm2nv_650M?): available: esm1b, esm1b_s",
    "data=mok": r"no data 'mok' (did you mean mock?): available: fasta, mixture, mock, mock_text, ",
    "optim@model.optim=adam_cosin": r"no optim 'adam_cosin' (did you mean adam_cosine?)",
    "dta@model.data=mock": r"no group 'dta' (did you mean data?): available: cluster, data,",
    "trainer=null": r"trainer is a group: choose one of default",
    "+model=esm2nv_8M": r"model has a value already: remove the + to replace it",
    "data=fasta": r"missing value: give model.data.dataset_path=...",
    # grammar and interpolation
    "model.lr": r"cannot read 'model.lr': write key=value",
    "=3": r"cannot read '=3': write key=value",
    "model.optim.lr=${oc.env:NO_SUCH_VARIABLE}": r"model.optim.lr: environment variable NO_SUCH_VARIABLE is not set",
    "model.optim.lr=${nope}": r"model.optim.lr: Interpolation key 'nope' not found",
    "model.optim.lr=${nope": r"model.optim.lr",
    "model.seed=${model.seed}": r"model.seed: Recursive interpolation detected",
    "model.seed=${mult:2}": r"model.seed: Unsupported interpolation type mult",
    "model.seed=${multiply:ab,3}": r"model.seed: multiply takes numbers, not 'ab'",
    "model.seed=${sum:true,3}": r"model.seed: sum takes numbers, not True",
    # targets
    "model._target_=bionemo.models.esm2nv.ESM2v": r"(did you mean bionemo.models.esm2nv.ESM2nv?)",
    "model._target_=nothing": r"model._target_: cannot import 'nothing'",
    "model._target_=os.path.join": r"model._target_: cannot import 'os.path.join': it is neither part of bionemo nor",
    # values that contradict each other
    "model.data.mask_percent=0.7": (
        r"model.data.mask_percent + model.data.perturb_percent + model.data.identity_percent is 0.9, expected 1"
    ),
    "model.data.modify_percent=15": r"model.data.modify_percent is 15.0, expected from 0 to 1",
    "model.num_attention_heads=7": r"model.hidden_size=768 is not divisible by model.num_attention_heads=7",
    "model.micro_batch_size=0": r"model.micro_batch_size is 0, expected at least 1",
    "model.tensor_model_parallel_size=2": r"is not divisible by model.tensor_model_parallel_size=2",
    "model.pipeline_model_parallel_size=4": r"num_layers=6 is not divisible by model.pipeline_model_parallel_size=4",
    "model.seq_length=2": r"model.seq_length is 2, expected at least 3: one token of the sequence and 2 at its ends",
    "exp_manager.name=a/b": r"exp_manager.name is a/b, expected a name without /, because files are named after it",
    "exp_manager.name=..": r"exp_manager.name is .., expected a name without /",
    "name=a/b": r"exp_manager.name is a/b, expected a name without /",
    "model.data.preprocessing.val_size=1.5": r"val_size is 1.5, expected a number of records, or a fraction below 1",
    "model.data.preprocessing.test_size=1.0": r"test_size is 1.0, expected a number of records, or a fraction below",
    "model.max_position_embeddings=10": r"model.seq_length=512 is longer than model.max_position_embeddings=10",
    "trainer.limit_val_batches=0": r"trainer.limit_val_batches is 0, but checkpoints are written after validations",
    "trainer.rank_timeout=00:00:00:00": r"trainer.rank_timeout is 00:00:00:00, expected a duration above zero",
    "trainer.rank_timeout=soon": r"trainer.rank_timeout is soon, expected a duration: DD:HH:MM:SS, or {hours: 1}",
    "trainer.max_steps=-1": r"trainer.max_steps is -1, expected at least 1 unless trainer.max_epochs is given",
    "trainer.accumulate_grad_batches=0": r"expected at least 1",
    "trainer.devices=two": r"trainer.devices is 'two', expected a number, auto, or indices such as [0,1]",
    "trainer.num_nodes=0": r"trainer.num_nodes is 0, expected at least 1",
    "model.optim.betas=[0.9]": r"model.optim.betas is [0.9], expected two numbers",
    "model.optim.sched.warmup_ratio=0.1": r"warmup_steps and model.optim.sched.warmup_ratio exclude each other",
    "model.data.mock.min_length=900": r"model.data.mock.min_length=900",
    "model.position_embedding_type=rope": r"model.position_embedding_type is 'rope', expected learned_absolute",
    "exp_manager.checkpoint_callback_params.filename='{step:999999999}'": r"but a format in it is invalid (it is too",
}


@pytest.mark.parametrize(("override", "message"), MISTAKES.items(), ids=list(MISTAKES))
def test_user_error(override, message):
    with pytest.raises(UserError) as caught:
        load("pretrain_small", [override], HOME)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_secret_in_the_name_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "made-up-value")
    with pytest.raises(UserError, match="contains a secret of the environment") as caught:
        load("pretrain_small", ["name=run-${oc.env:WANDB_API_KEY}"], HOME)
    assert "made-up-value" not in str(caught.value)


def test_global_batch_of_explicit_micro_batches() -> None:
    with pytest.raises(UserError, match="is 7, not a multiple of 2: the micro-batch size"):
        load("pretrain_small", ["model.global_batch_size=7", "model.micro_batch_size=2"], HOME)


def test_errors_are_reported_together_without_consequential_errors():
    overrides = [
        "model.data.long_sequences=cropp",
        "model.num_layer=3",
        "model.seed=a",
        "trainer.foo=1",
        "trainer.max_steps=x",
    ]
    with pytest.raises(UserError, match=re.escape("unknown key model.num_layer")) as caught:
        load("pretrain_small", overrides, HOME)
    assert str(caught.value).endswith("; and 2 more")
    with pytest.raises(UserError) as caught:
        load("pretrain_small", ["model.seed=a"], HOME)  # model.data.seed and the seeds of the splits inherit it
    assert str(caught.value) == "model.seed is 'a', expected int"


def test_a_run_without_max_steps_needs_them_for_its_schedule():
    overrides = ["trainer.max_steps=-1", "trainer.max_epochs=3"]
    with pytest.raises(UserError, match=re.escape("give model.optim.sched.max_steps=...")):
        load("pretrain_small", overrides, HOME)
    assert load("pretrain_small", [*overrides, "model.optim.sched.max_steps=9"], HOME).trainer.max_epochs == 3


def test_parallel_sizes_are_not_checked_for_automatic_device_counts():
    assert load("pretrain_small", ["trainer.devices=auto", "model.tensor_model_parallel_size=2"], HOME)


FILES = {
    "a: [1": r"bad.yaml, line 1",
    "a: 1\na: 2\n": r"bad.yaml, line 2: found duplicate key a",
    "- 1\n": r"config 'bad' must be a DictConfig, got ListConfig",
    "defaults: [pretrain_smal]\n": r"'pretrain_smal' for the defaults of 'bad' (did you mean pretrain_small?)",
    "defaults: [pretrain_small, {override /model: nope}]\n": r"no model 'nope': available: esm1b, esm1b_s",
    "defaults: [pretrain_small, {override /modl: nope}]\n": r"Could not override 'modl'",
    "defaults: [/pretrain]\n": r"You must specify 'model': one of esm1b, esm1b_small, esm1nv_small, esm2nv_",
    "defaults: [pretrain_small, _self_]\nmodel: {num_layer: 3}\n": r"(did you mean model.num_layers?)",
    "defaults: [pretrain_small, _self_]\nmodel: {data: {train: {sed: 3}}}\n": r"(did you mean model.data.train.seed?)",
    "defaults: [pretrain_small, _self_]\nmodel: 3\n": r"model is 3, expected a group of keys",
}


@pytest.mark.parametrize(("text", "message"), FILES.items(), ids=list(FILES))
def test_user_error_in_a_file(text, message, tmp_path):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        compose_typed(find_source("pretrain_small", HOME, "bad", tmp_path), [])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_misspelt_config_suggests_the_nearest_and_lists_all():
    with pytest.raises(
        UserError, match=r"did you mean pretrain_small\?\): available: base_config, .*infer, pretrain_small"
    ):
        load("pretrain_smal", [], HOME)


def test_missing_directory():
    with pytest.raises(UserError, match="config directory 'nowhere' not found"):
        find_config_dir("nowhere")


def test_unreadable_directory(tmp_path, monkeypatch):
    """Hydra would silently use the config of that name in the package."""
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(UserError, match="cannot be read: check the permissions"):
        find_config_dir(tmp_path)


def test_sweep_is_checked_before_its_first_run():
    source = find_source("pretrain_small", HOME)
    overrides = rewrite_overrides(source, ["model.seed=1,2", "model.micro_batch_size=4,x", "name=1e5"], sweep=True)
    jobs = expand_sweep(source, overrides)
    assert len(jobs) == 4
    assert compose_typed(source, jobs[0])[0].name == "1e5"
    with pytest.raises(UserError, match="micro_batch_size is 'x'"):
        compose_typed(source, jobs[1])
    with pytest.raises(UserError, match="hydra/launcher=joblib"):
        expand_sweep(source, ["hydra/launcher=joblib"])


def test_hints_never_raise():
    assert did_you_mean("a", []) == ""
    assert did_you_mean("a", [None]) == ""  # type: ignore[list-item]
    assert did_you_mean(None, ["a"]) == ""  # type: ignore[arg-type]


def test_default_number_of_sentinels() -> None:
    """The configuration may not import the tokenizers."""
    assert check._SENTINELS == SENTINEL_COUNT


MISTAKES_OF_OTHER_MODELS = {
    "prott5nv": {
        "model.data.seq_length_dec=154": "seq_length_dec is 154, expected at least 155: two tokens for each masked",
        "model.data.seq_length_dec=600": "model.data.seq_length_dec=600 is longer than model.max_position_embeddings",
        "model.tokenizer.num_sentinel_tokens=76": "num_sentinel_tokens is 76, expected 77 to 226: one for each masked",
        "model.tokenizer.num_sentinel_tokens=300": "num_sentinel_tokens is 300, expected 77 to 226",
        "model.data.max_ngram_size=3": "model.data.max_ngram_size is 3, which is not supported: set it to 1; spans",
        "model.data.masked_lm_prob=0": "model.data.masked_lm_prob is 0.0, expected above 0 and below 1",
        "model.pipeline_model_parallel_size=2 trainer.devices=2": "expected 1: pipeline parallelism is not supported",
        "model.sequence_parallel=True model.tensor_model_parallel_size=3 trainer.devices=3": "seq_length_dec=256",
        "model.data.mask_percent=0.1": "unknown key model.data.mask_percent",
        "model.normalization=rmsnorm": "model.normalization is rmsnorm, which is not supported: set it to layernorm",
    },
    "megamolbart": {
        "model.pipeline_model_parallel_size=8": "pipeline parallelism is not supported for encoder-decoder",
        "model.data.on_invalid=drop": "model.data.on_invalid is 'drop', expected one of skip, keep, error",
        "model.data.long_sequences=crop": "model.data.long_sequences is 'crop', expected one of truncate, drop, error",
        "data=mock": "model.data has the kind proteins, expected molecules: choose another",
        "model.name=null": "model.name is null, expected str",
    },
    "gpt3": {
        "model.data.data_impl=csv_mmap": "model.data.data_impl is 'csv_mmap', expected one of mmap, mock",
        "model.global_batch_size=100": "model.global_batch_size is 100, not a multiple of 64 model replicas",
        "model.global_batch_size=100 model.micro_batch_size=4": "is 100, not a multiple of 256: the micro-batch size",
        "model.data.seq_length=1024": "model.data.seq_length is 1024, but model.seq_length=2048 is the length",
        "data=uniref50": "model.data has the kind proteins, expected text: choose another",
        "model.activation=relu": "model.activation is 'relu', expected one of gelu, gelu_tanh",
    },
}
CONFIGS = {
    "prott5nv": ("pretrain_small", "protein"),
    "megamolbart": ("pretrain_base", "molecule"),
    "gpt3": ("pretrain_gpt3_126m", "."),
}


@pytest.mark.parametrize(
    ("model", "overrides"),
    [(model, overrides) for model, table in MISTAKES_OF_OTHER_MODELS.items() for overrides in table],
)
def test_user_errors_of_other_models(model, overrides):
    name, directory = CONFIGS[model]
    with pytest.raises(UserError) as caught:
        load(name, overrides.split(), ROOT / "examples" / directory / model / "conf")
    assert MISTAKES_OF_OTHER_MODELS[model][overrides] in str(caught.value)

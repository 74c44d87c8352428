# SPDX-License-Identifier: Apache-2.0
"""A number outside its range is reported in one line with key, value and expected range."""

from pathlib import Path

import pytest

from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.paths import CONF_DIR
from bionemo.config.schema import DownstreamConfig, InferConfig, PreparationConfig
from tests.conftest import EXAMPLES

WRONG = {
    "trainer.gradient_clip_val": ["-1", "nan", "inf"],
    "trainer.max_steps": ["-2", "1e30", "0.5"],
    "trainer.val_check_interval": ["0", "-1", "1.5", "nan"],
    "trainer.limit_val_batches": ["-1", "1.5"],
    "trainer.log_every_n_steps": ["0", "-1"],
    "trainer.accumulate_grad_batches": ["0", "-3"],
    "trainer.num_sanity_val_steps": ["-2"],
    "trainer.num_nodes": ["0", "1e30"],
    "trainer.devices": ["0", "-3", "1e30"],
    "trainer.max_time": ["soon", "-1:00:00:00", "00:00:00:00", "99999999999:00:00:00"],
    "trainer.rank_timeout": ["00:00:00:00", "{hours: -1}"],
    "model.optim.lr": ["0", "-1e-3", "nan", "inf"],
    "model.optim.weight_decay": ["-0.1", "nan"],
    "model.optim.eps": ["0", "-1"],
    "model.optim.betas": ["[0.9]", "[0.9,1.0]", "[0.9,nan]"],
    "model.optim.sched.min_lr": ["-1", "nan"],
    "model.optim.sched.warmup_steps": ["-1", "1.5"],
    "model.optim.sched.max_steps": ["-2"],
    "model.hidden_dropout": ["1.0", "-0.1", "nan"],
    "model.attention_dropout": ["1.5"],
    "model.seq_length": ["0", "-5", "1e30"],
    "model.num_layers": ["0", "1e9"],
    "model.hidden_size": ["0", "1e9"],
    "model.num_attention_heads": ["0", "-4"],
    "model.micro_batch_size": ["0", "1e12"],
    "model.layernorm_epsilon": ["0", "nan"],
    "model.init_method_std": ["-1", "inf"],
    "model.make_vocab_size_divisible_by": ["0", "1e12"],
    "model.seed": ["-1", "1e30"],
    "model.data.num_workers": ["-1", "100000"],
    "model.data.modify_percent": ["15", "-0.1", "nan"],
    "model.data.packing_window": ["0"],
    "model.data.data_impl_kwargs.csv_mmap.header_lines": ["-1"],
    "model.data.data_impl_kwargs.csv_mmap.newline_int": ["256"],
    "model.data.data_impl_kwargs.csv_mmap.data_col": ["-1"],
    "exp_manager.checkpoint_callback_params.save_top_k": ["-2", "1e30"],
    "exp_manager.checkpoint_callback_params.every_n_train_steps": ["-1"],
    "exp_manager.max_time_per_run": ["soon"],
}
ESM1 = ("pretrain_small", EXAMPLES / "esm1nv" / "conf")


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_out_of_range_in_a_run(key: str, value: str) -> None:
    with pytest.raises(UserError) as caught:
        load(ESM1[0], [f"{key}={value}"], ESM1[1])
    message = str(caught.value)
    assert message.startswith(f"{key} is ") and "expected" in message and "\n" not in message
    assert len(message) < 250


@pytest.mark.parametrize(
    "override",
    [
        "trainer.max_epochs=-1", "trainer.gradient_clip_val=0", "trainer.gradient_clip_val=null",
        "trainer.val_check_interval=1.0", "trainer.limit_test_batches=0", "trainer.num_sanity_val_steps=-1",
        "trainer.devices=auto", "trainer.max_time={hours: 4}", "model.optim.sched.max_steps=-1",
        "model.optim.sched.min_lr=0.0", "model.optim.lr=1", "model.data.num_workers=0", "model.kv_channels=null",
        "exp_manager.checkpoint_callback_params.save_top_k=-1", "model.hidden_dropout=0",
    ],
)  # fmt: skip
def test_special_values_are_accepted(override: str) -> None:
    load(ESM1[0], [override], ESM1[1])


OTHERS = {
    "predict": {
        "model.data.batch_size": ["0"], "model.downstream_task.sampling.temperature": ["0", "nan"],
        "model.downstream_task.sampling.top_p": ["1.5"], "model.downstream_task.sampling.num_samples": ["0"],
        "model.downstream_task.sampling.beam_size": ["0"], "trainer.rank_timeout": ["00:00:00:00"],
    },
    "downstream_flip_sec_str": {
        "model.peft.lora_tuning.adapter_dim": ["0"], "model.downstream_task.dropout": ["1.0"],
        "model.encoder_lr_scale": ["0", "nan"], "model.finetuning_optim.lr": ["0"], "trainer.devices": ["0"],
        "model.finetuning_optim.betas": ["[0.9]"],
    },
    "sequences": {"val_size": ["-1", "nan"], "num_csv_files": ["0"], "num_preprocess_workers": ["0", "1e30"]},
}  # fmt: skip
CONFIGS: dict[str, tuple[type, Path | None, list[str]]] = {
    "predict": (InferConfig, CONF_DIR, ["model.downstream_task.restore_from_path=m", "model.data.dataset_path=d"]),
    "downstream_flip_sec_str": (DownstreamConfig, None, []),
    "sequences": (PreparationConfig, CONF_DIR / "preparation", ["source=s", "output=o"]),
}


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [(name, key, value) for name, keys in OTHERS.items() for key, values in keys.items() for value in values],
)
def test_out_of_range_in_other_commands(name: str, key: str, value: str) -> None:
    schema, directory, overrides = CONFIGS[name]
    load(name, overrides, directory, schema)
    with pytest.raises(UserError) as caught:
        load(name, [*overrides, f"{key}={value}"], directory, schema)
    assert str(caught.value).startswith(f"{key} is ") and "expected" in str(caught.value)


def test_split_fractions_leave_records_for_training() -> None:
    schema, directory, overrides = CONFIGS["sequences"]
    with pytest.raises(UserError, match=r"val_size \+ test_size is 1.1, expected below 1"):
        load("sequences", [*overrides, "val_size=0.5", "test_size=0.6"], directory, schema)
    assert load("sequences", [*overrides, "val_size=500", "test_size=0.6"], directory, schema).val_size == 500

# SPDX-License-Identifier: Apache-2.0
"""Search of layouts and micro-batches: the fastest that fits, its command, the limit if none fits, and its costs."""

import json
import shlex
import sys
from dataclasses import astuple, replace
from itertools import product
from typing import Any

import pytest
import yaml

from bionemo.cli import plan as command
from bionemo.cli.pretrain import main as pretrain
from bionemo.common.gpus import DEVICES
from bionemo.config.check import check_config
from bionemo.config.schema import RunConfig
from bionemo.planning.layouts import read_layout
from bionemo.planning.measure import estimate_step, measure_step
from bionemo.planning.report import make_plan, make_step
from bionemo.planning.search import search_layouts
from tests.planning.simulated_rank import FAMILIES, SEQUENCE, STAGES, config

H100 = DEVICES["h100"]
LAYOUTS: dict[str, dict[str, Any]] = {"one": {}, "sequence": SEQUENCE, "stages": STAGES}
FAST = {("esm2nv", "stages")}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(*each, marks=[] if each in FAST else pytest.mark.slow)
        for each in product(FAMILIES, LAYOUTS)
        if each[1] != "stages" or each[0] not in ("prott5nv", "megamolbart")
    ],
)
def test_extrapolated_costs_are_those_of_all_layers(family: str, layout: str) -> None:
    cfg = config(family, num_layers=8, **LAYOUTS[layout])
    step, parallel = make_step(cfg, "bf16-mixed", H100), read_layout(cfg)
    for rank in {0, parallel.tensor * (parallel.pipeline - 1)}:
        expected = astuple(measure_step(step, parallel, rank))
        assert astuple(estimate_step(step, parallel, rank)) == pytest.approx(expected, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [1.0, 0.6])
def test_the_fastest_of_all_layouts_is_found(memory: float) -> None:
    """With less memory than the largest micro-batch needs, others are the fastest."""
    cfg = config("esm2nv", gpus=2, num_layers=2, hidden_size=256, ffn_hidden_size=1024, micro_batch_size=4)
    expected = {}
    for tensor, pipeline, size in [(1, 1, 1), (1, 1, 2), (1, 1, 4), (2, 1, 4), (2, 1, 8), (1, 2, 2), (1, 2, 4)]:
        model = replace(
            cfg.model, tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline,
            sequence_parallel=tensor > 1, micro_batch_size=size, global_batch_size=8,
        )  # fmt: skip
        if tensor * pipeline == 1:
            model = replace(model, optim=replace(model.optim, name="distributed_fused_adam"))
        other = replace(cfg, model=model)
        assert not check_config(other)
        expected[tensor, pipeline, size] = make_plan(other, read_layout(other), H100)
    most = expected[1, 1, 4].memory.total
    device = replace(H100, memory=round(1 + memory * most / 0.92 / 2**20))
    found, limit = search_layouts(cfg, make_plan(cfg, read_layout(cfg), device))
    assert limit == ""
    fitting = [each.duration.total for each in expected.values() if each.memory.total <= device.usable]
    assert found[0][0].duration.total == pytest.approx(min(fitting), rel=0.02)
    assert [each.duration.total for each, _ in found] == sorted(each.duration.total for each, _ in found)
    for plan, changed in found:
        assert plan.fits and not check_config(changed)
        assert plan.layout == read_layout(changed)
        same = expected.get((plan.layout.tensor, plan.layout.pipeline, plan.layout.micro_batches.size))
        if same is not None and changed.model.activations_checkpoint_granularity is None:
            assert plan.memory.total == pytest.approx(same.memory.total, rel=0.02)


@pytest.mark.slow
def test_3b_on_8_h100() -> None:
    """Replicas of one GPU with divided moments and micro-batches of 8 rows, which are faster than two stages."""
    cfg = command_config("--config-name=pretrain_esm2_3B", "trainer.devices=8", "model.global_batch_size=512")
    found, _ = search_layouts(cfg, make_plan(cfg, read_layout(cfg), H100))
    (best, changed), *others = found
    assert (best.layout.data, best.layout.micro_batches.size) == (8, 8)
    assert changed.model.optim.name == "distributed_fused_adam"
    assert best.memory.total / 2**30 == pytest.approx(57.6, abs=0.2)
    [stages] = [
        plan for plan, _ in others if (plan.layout.tensor, plan.layout.pipeline) == (1, 2)
        and plan.layout.micro_batches.size == 8
    ]  # fmt: skip
    assert 1.02 < stages.duration.total / best.duration.total < 1.2


def command_config(*arguments: str) -> RunConfig:
    """Return the configuration of a command line."""
    found: list[RunConfig] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["plan.py", *arguments])
        patch.setattr(command, "print_plan", lambda cfg, _: found.append(cfg))
        command.main()
    return found[0]


def plan_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["bionemo plan", "--json", *arguments])
    command.main()
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


SMALL = ["--config-name=pretrain_esm2_8M", "trainer.devices=2", "model.num_layers=2", "model.hidden_size=64",
         "model.ffn_hidden_size=256", "model.num_attention_heads=4", "model.data.dataset_path=a b"]  # fmt: skip


def test_pretrain_accepts_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its plan is that of the first layout, and its end that of --tokens."""
    requested = [*SMALL, "model.global_batch_size=4", "model.tensor_model_parallel_size=2"]
    plan = plan_json(monkeypatch, capsys, *requested, "--tokens=1.5B")
    words = shlex.split(plan["command"].replace("\\\n", ""))
    assert words[:2] == ["bionemo", "pretrain"]
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *words[2:], "--cfg", "job"])
    pretrain()
    cfg = yaml.safe_load(capsys.readouterr().out)
    layout = plan["layouts"][0]["layout"]
    assert cfg["model"]["tensor_model_parallel_size"] == layout["tensor"]
    assert cfg["model"]["data"]["dataset_path"] == "a b"
    assert (cfg["trainer"]["max_steps"], cfg["model"]["global_batch_size"]) == (plan["steps"], 4)
    tokens = plan["tokens_per_second"] * plan["seconds"]
    assert 0 <= plan["steps"] * tokens - 1.5e9 < tokens
    again = plan_json(monkeypatch, capsys, *words[2:])
    assert again["layout"] == layout
    assert again["seconds"] == pytest.approx(plan["layouts"][0]["seconds"], rel=0.02)
    assert again["layouts"][0]["layout"] == layout


@pytest.mark.parametrize("text", ["100X", "0B", "B", "-1B", "nan", "1.B", ""])
def test_a_wrong_number_of_tokens(
    text: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["plan.py", f"--tokens={text}"])
    with pytest.raises(SystemExit):
        command.main()
    assert capfd.readouterr().err.startswith("error: argument --tokens: invalid tokens value")


@pytest.mark.parametrize(("rows", "noted"), [([], True), (["model.global_batch_size=4"], False)])
def test_the_default_batch_of_a_large_model_is_noted(
    rows: list[str], noted: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_LARGE", 1000)
    monkeypatch.setattr(sys, "argv", ["plan.py", *SMALL, *rows])
    command.main()
    out, err = capsys.readouterr()
    assert ("note: model.global_batch_size is not set: a step has 4 rows, 4,096 tokens." in err) == noted
    assert "the simplest of the fastest" in out and "bionemo pretrain" in out


def limit_of(cfg: RunConfig, memory: int) -> str:
    found, limit = search_layouts(cfg, make_plan(cfg, read_layout(cfg), replace(H100, memory=memory)))
    assert not found
    return limit


def test_the_limit_of_a_search_without_result() -> None:
    """The memory of the smallest layout, or the contradiction that all layouts have."""
    assert limit_of(config("esm2nv", gpus=2), 1) == (
        "data 1 x tensor 2 x pipeline 1 with micro-batches of 1 rows needs 0.0 GiB per GPU, but 0.0 GiB of H100 80 GB "
        "can be used"
    )
    cfg = config("prott5nv", gpus=2, tensor_model_parallel_size=2, micro_batch_size=1)
    cfg = replace(cfg, trainer=replace(cfg.trainer, devices=1, num_nodes=2))
    assert "not a multiple of 2" in limit_of(cfg, H100.memory)

# SPDX-License-Identifier: Apache-2.0
"""Values of wrong types in state.json cause a one-line error in every reader."""

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bionemo.checkpoint import Checkpoint
from bionemo.checkpoint.state_schema import check_state, find_missing_entry
from bionemo.common.errors import UserError
from bionemo.inference.load import load
from bionemo.interop.convert import convert, describe
from bionemo.megatron.precision import resolve_precision
from bionemo.megatron.strategy import MegatronStrategy
from bionemo.megatron.vocabulary import language_model_loss
from bionemo.models.esm2nv import ESM2nv
from bionemo.tokenizers import load_tokenizer
from bionemo.training.module import TrainingModule
from bionemo.training.resume import check_resumable
from tests.support.forged_checkpoints import forge
from tests.support.runs import config, last_checkpoint, train

WRONG = [None, "x", -1, 1e308, [], {"$dict": []}, {"$dict": [[1, 1]]}, {"$tensor": [1.0], "dtype": "float32",
         "shape": [1]}, "${oc.env:HOME}"]  # fmt: skip
RUN = "trainer.max_steps=2", "trainer.val_check_interval=2", "model.num_layers=1"
Key = tuple[Any, ...]


def build_module(directory: Path) -> TrainingModule:
    """Return the module of the run of `trained`."""
    cfg = config(directory, *RUN)
    build = partial(ESM2nv, cfg.model, load_tokenizer("esm2nv"))
    return TrainingModule(build, language_model_loss, cfg.model, cfg.trainer, resolve_precision("32"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    train(config(directory, *RUN))
    return last_checkpoint(directory)


def nodes(value: Any, path: Key = ()) -> Iterator[Key]:
    yield path
    if isinstance(value, dict | list):
        for key, below in value.items() if isinstance(value, dict) else enumerate(value):
            yield from nodes(below, (*path, key))


def replaced(value: Any, path: Key, new: Any) -> Any:
    if not path:
        return new
    value = copy.copy(value)
    value[path[0]] = replaced(value[path[0]], path[1:], new)
    return value


def test_mutations(trained: Path, tmp_path: Path) -> None:
    state = json.loads((trained / "state.json").read_text())
    module = build_module(tmp_path)
    model = module.build_on_meta()
    draw = random.Random(0)
    refused = 0
    for number in range(60):
        path, wrong = draw.choice(list(nodes(state))), draw.choice(WRONG)
        forged = tmp_path / str(number)
        shutil.copytree(trained, forged)
        (forged / "state.json").write_text(json.dumps(replaced(state, path, wrong)))
        forge(forged)
        readers: list[Callable[[], object]] = [
            lambda: describe(forged),  # noqa: B023
            lambda: load(forged, "cpu"),  # noqa: B023
            lambda: convert(forged, forged / "x.nemo"),  # noqa: B023
            lambda: MegatronStrategy().load_checkpoint(forged),  # noqa: B023
            lambda: check_resumable(Checkpoint(forged), module, model),  # noqa: B023
        ]
        for read in readers:
            try:
                read()
            except UserError as error:  # anything else fails the test
                assert "\n" not in str(error)
                refused += 1
    assert refused > 20


def test_a_state_of_a_run_is_accepted(trained: Path) -> None:
    assert MegatronStrategy().load_checkpoint(trained)["global_step"] == 2
    module = build_module(trained)
    check_resumable(Checkpoint(trained), module, module.build_on_meta())


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([], "state is not a mapping"),
        ({"global_step": -1}, "state.global_step is not a non-negative integer"),
        ({"global_step": True}, "state.global_step is not a non-negative integer"),
        ({"SequenceData": {"position": {"row": 1.5}}}, r"position.row is not a non-negative integer"),
        ({"config": {"num_layers": object()}}, "state.config.num_layers is not a plain value"),
        ({"callbacks": {"LossCurve": {"train": [[1, "x"]]}}}, r"train\[0\]\[1\] is not a number"),
    ],
)
def test_wrong_types_are_refused(state: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_state(state)


def test_missing_entries() -> None:
    assert find_missing_entry({}) == "global_step"
    assert find_missing_entry({"SequenceData": {"position": {"window_start": 0}}}, "SequenceData.position") == (
        "SequenceData.position.row"
    )

# SPDX-License-Identifier: Apache-2.0
"""Keys of the schema agree with the libraries that read them; conversion to the schema."""

import ast
import importlib.util
import inspect
import pkgutil
import re
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

import pytest
from omegaconf import OmegaConf

from bionemo.common.errors import UserError
from bionemo.config import schema
from bionemo.config.hints import all_keys, describe
from bionemo.config.schema import EncoderConfig, RunConfig, TrainerConfig, exp_manager, ranges
from bionemo.config.schema_reader import SchemaReader, convert
from bionemo.config.targets import target_schema
from bionemo.config.v1_keys import IGNORED
from tests.conftest import ROOT

# Objects created by the command.
LEFT_OUT = {"strategy", "plugins", "callbacks", "model_registry"}
SINCE_2_6 = {"enable_autolog_hparams", "add_file_policy"}  # of Lightning


# Names of the dataclasses of NeMo's exp_manager, and the keys where they are.
GROUPS = {
    "ExpManagerConfig": "exp_manager.", "CallbackParams": "exp_manager.checkpoint_callback_params.",
    "MLFlowParams": "exp_manager.mlflow_logger_kwargs.", "ClearMLParams": "exp_manager.clearml_logger_kwargs.",
}  # fmt: skip


def names(dataclass_type, prefix="?"):
    """Return the keys of a dataclass, and the ignored keys directly below a prefix."""
    ignored = {key.removeprefix(prefix) for key in IGNORED if key.startswith(prefix)}
    return {field.name for field in fields(dataclass_type)} | {key for key in ignored if "." not in key}


def test_trainer_schema_has_every_argument_of_lightning():
    from lightning.pytorch import Trainer

    v1 = {"replace_sampler_ddp", "resume_from_checkpoint"} | LEFT_OUT
    assert (
        names(TrainerConfig, "trainer.") - {"rank_timeout"} - v1
        == set(inspect.signature(Trainer).parameters) - LEFT_OUT - SINCE_2_6
    )


def test_wandb_logger_schema_has_the_arguments_of_lightning_and_wandb():
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    ours = names(exp_manager.WandbLoggerConfig, "exp_manager.wandb_logger_kwargs.")
    theirs = set(inspect.signature(WandbLogger).parameters) - SINCE_2_6
    assert theirs - ours == {"experiment", "kwargs"}  # an object
    assert ours <= set(inspect.signature(WandbLogger).parameters) | set(inspect.signature(wandb.init).parameters)


def nemo_dataclasses():
    """Return the fields of NeMo's dataclasses, parsed from its source: importing NeMo would be slow."""
    package = Path(importlib.util.find_spec("nemo").submodule_search_locations[0])
    files = [package / "utils" / "exp_manager.py", *(package / "utils" / "loggers").glob("*.py")]
    for node in (node for file in files for node in ast.parse(file.read_text()).body):
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list):
            yield node.name, {line.target.id for line in node.body if isinstance(line, ast.AnnAssign)}


def test_exp_manager_schema_has_every_key_of_nemo():
    theirs = dict(nemo_dataclasses())
    of_nemo_1_23 = {"log_local_rank_0_only", "log_global_rank_0_only"}
    ours = {
        n: names(c, GROUPS.get(n, "?"))
        for n, c in vars(exp_manager).items()
        if is_dataclass(c) and n != "WandbLoggerConfig"
    }
    assert ours.pop("ExpManagerConfig") - of_nemo_1_23 == theirs["ExpManagerConfig"]
    assert ours == {name: theirs[name] for name in ours}
    assert {"CallbackParams", "EarlyStoppingParams", "MLFlowParams"} <= set(ours)


@pytest.mark.parametrize("name", [name for name, value in vars(schema).items() if is_dataclass(value)])
def test_default_values_are_defined_in_yaml(name):
    dataclass_type = getattr(schema, name)
    assert dataclass_type.__doc__ and not dataclass_type.__doc__.startswith(dataclass_type.__name__)
    assert {field.default for field in fields(dataclass_type)} <= {MISSING, None}


@dataclass(kw_only=True)
class ToyConfig:
    _target_: str
    size: int
    kind: Literal["a", "b"] = None  # type: ignore[assignment]


class Toy:
    def __init__(self, config: ToyConfig) -> None:
        self.config = config


def test_schema_of_a_class_outside_the_package(monkeypatch):
    monkeypatch.setenv("BIONEMO_TRUSTED_PACKAGES", __name__)
    target = f"{__name__}.Toy"
    assert target_schema(target, ToyConfig) is ToyConfig
    reader = SchemaReader()
    toy = reader.read(OmegaConf.create({"_target_": target, "size": "3"}), ToyConfig)
    assert toy == ToyConfig(_target_=target, size=3)
    assert reader.read(OmegaConf.create({"_target_": target, "size": "x", "siz": 1}), ToyConfig) is None
    assert reader.problems == ["unknown key siz (did you mean size?)", "size is 'x', expected int"]
    with pytest.raises(UserError, match=r"cannot import 'a\.b\.C'"):
        target_schema("a.b.C", object)
    with pytest.raises(UserError, match="takes a ToyConfig, expected a EncoderConfig"):
        target_schema(target, EncoderConfig)


class Annotated:
    """Annotates `config` in the class body."""

    config: ToyConfig


def test_schema_is_the_annotation_of_the_class_body(monkeypatch):
    monkeypatch.setenv("BIONEMO_TRUSTED_PACKAGES", __name__)
    assert target_schema(f"{__name__}.Annotated", object) is ToyConfig


@dataclass(kw_only=True)
class WiderConfig(ToyConfig):
    width: int


class Derived(Annotated):
    """Annotates the constructor's argument more narrowly than its base class does."""

    def __init__(self, config: WiderConfig) -> None:
        self.config = config


def test_schema_is_the_more_specific_annotation_of_the_constructor(monkeypatch):
    monkeypatch.setenv("BIONEMO_TRUSTED_PACKAGES", __name__)
    assert target_schema(f"{__name__}.Derived", ToyConfig) is WiderConfig


def test_a_number_beyond_the_range_of_float_is_rejected():
    with pytest.raises(TypeError):
        convert(10**400, float)


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        ("8", int, 8),
        (8.0, int, 8),
        (2**63 + 1, int, 2**63 + 1),
        ("1e3", float, 1000.0),
        (1, float, 1.0),
        ("yes", bool, True),
        (0, bool, False),
        (32, Literal["32", "16-mixed"], "32"),
        (5, str, "5"),
        (1.0, int | float, 1.0),
        (1, int | float | None, 1),
        (None, int | None, None),
        ("2", int | str | list[int], 2),
        ("auto", int | str | list[int], "auto"),
        ("warn", bool | Literal["warn"] | None, "warn"),
        (OmegaConf.create([1, "2"]), int | str | list[int], [1, 2]),
        (OmegaConf.create({"a": "1"}), dict[str, int], {"a": 1}),
    ],
)
def test_conversion(value, hint, expected):
    result = convert(value, hint)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (True, int),
        (1.5, int),
        ("", int),
        ("inf", int),
        (float("inf"), int),
        ("x", float),
        (2, bool),
        (None, str),
        ("c", Literal["a"]),
        (OmegaConf.create([]), int),
        (OmegaConf.create(["x"]), list[int]),
        (OmegaConf.create({}), str),
        ("x", list[str]),
    ],
)
def test_no_conversion(value, hint):
    with pytest.raises(TypeError):
        convert(value, hint)


def test_descriptions_of_types():
    assert describe(int | None) == "int or null"
    assert describe(Literal["a", "b"] | None) == "one of a, b or null"
    assert describe(list[float]) == "a list of float"
    assert describe(RunConfig) == "a group of keys"


def test_all_keys_are_full_keys():
    keys = set(all_keys(RunConfig))
    assert {"model.data.packing_window", "exp_manager.early_stopping_callback_params.patience", "name"} <= keys


# Passed as a whole to Lightning's Trainer, its WandbLogger, and NeMo's exp_manager.
PASSED_ON = {
    "TrainerConfig", "WandbLoggerConfig", "MLFlowParams", "DLLoggerParams", "ClearMLParams", "EarlyStoppingParams",
}  # fmt: skip
WITHOUT_EFFECT = {"desc", "peft_scheme"}  # free text, and a key with one possible value


def names_used_in_code() -> set[str]:
    """Return attributes and strings in the code, words in the templates, and keys that `conf/` refers to."""
    files = [path for path in (ROOT / "bionemo").rglob("*.py") if path.parent.name != "schema"]
    nodes = [node for path in files if path.stem != "v1_keys" for node in ast.walk(ast.parse(path.read_text()))]
    found = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    found |= {name for text in texts for name in text.split(".")}  # a name or a dotted key
    for path in (ROOT / "bionemo" / "launch" / "templates").iterdir():
        found |= set(re.findall(r"\w+", path.read_text()))
    references = [re.findall(r"\$\{([^}]*)\}", path.read_text()) for path in (ROOT / "conf").rglob("*.yaml")]
    templates = [re.findall(r"\.(\w+)", path.read_text()) for path in (ROOT / "bionemo").rglob("*.j2")]
    found |= {name for names in templates for name in names}
    return found | {word for group in references for text in group for word in re.split(r"\W+", text)}


def keys_not_passed_to_nemo() -> set[str]:
    """Return the keys of `_DISABLED_FEATURES` in experiment/nemo.py, parsed because importing it would be slow."""
    tree = ast.parse((ROOT / "bionemo" / "experiment" / "nemo.py").read_text())
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    [table] = [node.value for node in assigned if getattr(node.targets[0], "id", "") == "_DISABLED_FEATURES"]
    return set(ast.literal_eval(table))


def test_every_key_is_read_or_its_lack_of_effect_is_noted():
    used, not_passed = names_used_in_code(), keys_not_passed_to_nemo()
    modules = [vars(import_module(f"{schema.__name__}.{each.name}")) for each in pkgutil.iter_modules(schema.__path__)]
    classes = {value for module in modules for value in module.values() if isinstance(value, type)}
    unread = {
        f"{each.__name__}.{field.name}"
        for each in classes
        if is_dataclass(each) and each.__name__ not in PASSED_ON and each.__module__ != f"{schema.__name__}.ranges"
        for field in fields(each)
        if field.name not in used | WITHOUT_EFFECT
        and (each.__name__ != "ExpManagerConfig" or field.name in not_passed)
    }
    assert not unread


def test_every_key_has_a_description() -> None:
    """A key is described by a comment after it, or by `#:` lines above it."""
    undescribed = []
    for path in sorted(set(Path(schema.__file__).parent.glob("*.py")) - {Path(ranges.__file__)}):
        lines = path.read_text().splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.col_offset:
                after, above = lines[(node.end_lineno or 0) - 1], lines[node.lineno - 2].strip()
                if not ("  # " in after or above.startswith("#: ")):
                    undescribed.append(f"{path.name}:{node.lineno}: {node.target.id}")
    assert undescribed == []

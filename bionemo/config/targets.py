# SPDX-License-Identifier: Apache-2.0
"""Classes that a configuration or the file of a model may name in `_target_`.

A name is accepted if it is

* in the table of this module,
* in the entry-point group `bionemo.models` of an installed package:
  `[project.entry-points."bionemo.models"]`, `mine = "mylab.models:Mine"`, or
* in a package listed in the environment variable `BIONEMO_TRUSTED_PACKAGES`, such as `mylab,other.part`.

The name is checked before anything is imported, because importing a module runs its code.
"""

import importlib
import os
from typing import Any, TypeVar, get_type_hints

from bionemo.common.errors import UserError
from bionemo.config import schema
from bionemo.config.hints import did_you_mean

ENTRY_POINT_GROUP, TRUSTED_PACKAGES = "bionemo.models", "BIONEMO_TRUSTED_PACKAGES"
# Class, or function that prepares data -> its dataclass, so that a configuration is checked without importing torch.
TARGETS: dict[str, type] = {
    "bionemo.models.esm1b.ESM1b": schema.ESM1bConfig,
    "bionemo.models.esm1nv.ESM1nv": schema.ESM1nvConfig,
    "bionemo.models.esm2nv.ESM2nv": schema.ESM2nvConfig,
    "bionemo.models.esmc.ESMC": schema.ESMCConfig,
    "bionemo.models.gpt3.GPT3": schema.GPT3Config,
    "bionemo.models.megamolbart.MegaMolBART": schema.MegaMolBARTConfig,
    "bionemo.models.prott5nv.ProtT5nv": schema.ProtT5nvConfig,
    "bionemo.launch.bcp.Bcp": schema.BcpConfig,
    "bionemo.launch.kubernetes.Kubernetes": schema.KubernetesConfig,
    "bionemo.launch.local.Local": schema.LocalConfig,
    "bionemo.launch.mpi.Mpi": schema.MpiConfig,
    "bionemo.launch.ray.Ray": schema.RayConfig,
    "bionemo.launch.slurm.Slurm": schema.SlurmConfig,
    "bionemo.preparation.flip.prepare": schema.FlipJob,
    "bionemo.preparation.megatron_corpus.prepare": schema.TextJob,
    "bionemo.preparation.moleculenet.prepare": schema.MoleculeNetJob,
    "bionemo.preparation.sequences.prepare": schema.SequencesJob,
    "bionemo.preparation.uniref.prepare": schema.ClustersJob,
    "bionemo.preparation.uspto.prepare": schema.UsptoJob,
    "bionemo.preparation.zinc.prepare": schema.ZincJob,
}
T = TypeVar("T")


def import_target(name: str) -> Any:
    """Import the class or the function that a configuration names.

    Raises:
        UserError: if the name is not allowed or does not exist.
    """
    shown, hint = repr(name[:100]), did_you_mean(name[:100], TARGETS)
    if not is_allowed(name):
        raise UserError(
            f"cannot import {shown}: it is neither part of bionemo nor allowed by the entry point {ENTRY_POINT_GROUP} "
            f"or by {TRUSTED_PACKAGES}=PACKAGE{hint}"
        )
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"cannot import {shown}: {error}{hint}") from error
    defined = f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}"
    if name not in TARGETS and not (isinstance(found, type) and defined == name):
        raise UserError(f"cannot import {shown}: it is {defined}, expected a class under its own name{hint}")
    return found


def is_allowed(name: str) -> bool:
    """Return whether a name may be imported, without importing anything."""
    if name in TARGETS or name in _entry_points():
        return True
    packages = (package.strip() for package in os.environ.get(TRUSTED_PACKAGES, "").split(","))
    return any(package and name.startswith(f"{package}.") for package in packages)


def known_models() -> list[str]:
    """Return the names of the model classes of bionemo and of installed packages."""
    return [*(name for name in TARGETS if name.startswith("bionemo.models.")), *_entry_points()]


def target_schema(target: str, expected: type[T]) -> type[T]:
    """Return the dataclass of a `_target_`: the type of its attribute or constructor argument `config`.

    Raises:
        UserError: if the class cannot be imported, or its dataclass is not a subclass of `expected`.
    """
    found = TARGETS.get(target)
    if found is None:
        imported = import_target(target)
        declared, found = (get_type_hints(each).get("config") for each in (imported, imported.__init__))
        if declared is not None and not (isinstance(found, type) and issubclass(found, declared)):
            found = declared  # else the type of the constructor's argument, which is more specific
    if found is None:
        raise UserError(f"{target} has no attribute `config` annotated with a dataclass")
    if not issubclass(found, expected):
        raise UserError(f"{target} takes a {found.__name__}, expected a {expected.__name__}")
    return found


def _entry_points() -> list[str]:
    from importlib.metadata import entry_points  # 10 ms, for models outside this package only

    return [entry.value.replace(":", ".") for entry in entry_points(group=ENTRY_POINT_GROUP)]

# SPDX-License-Identifier: Apache-2.0
"""Import Lightning and NeMo without the packages of their optional functions, which take half of the import time."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any
from unittest.mock import patch

_UNUSED = ("matplotlib", "scipy", "transformers")  # torchmetrics omits plots and metrics of audio, images and text


@contextmanager
def quick_imports() -> Iterator[None]:
    """Speed up the imports of Lightning and NeMo in a `with` block; do nothing if Lightning has been imported already.

    Garbage collection is paused in the block and later ignores the modules, which live until the process ends.
    Lightning's dependency torchmetrics is imported as if the packages in `_UNUSED` were not installed.
    """
    if "lightning" in sys.modules:  # the second run of a process; gc.freeze would keep garbage of the first one
        yield
        return
    gc.disable()
    try:
        from lightning_utilities.core import imports

        with suppress(ImportError, AttributeError):  # with another version, Lightning then imports torchmetrics
            has, met = imports.package_available, imports.RequirementCache
            without: dict[str, Any] = {"package_available": lambda name: name not in _UNUSED and has(name)}
            without["RequirementCache"] = lambda requirement=None, module=None: (
                not str(requirement).startswith(_UNUSED) and met(requirement, module)
            )
            with patch.multiple(imports, **without):
                import torchmetrics  # noqa: F401
        yield
    finally:
        gc.freeze()
        gc.enable()


def import_exp_manager() -> Any:
    """Import NeMo's exp_manager without two packages, which are executed when they are used.

    `nemo.collections.common` loads transformers. pandas is needed by NeMo's logger for ClearML only.
    """
    import nemo.collections

    spec = find_spec("nemo.collections.common")
    if spec is not None and spec.name not in sys.modules:
        package: Any = module_from_spec(spec)
        package.__getattr__ = partial(_execute, package)
        sys.modules[spec.name] = nemo.collections.common = package
    from lightning.pytorch import loggers
    from lightning.pytorch.loggers import neptune

    # NeMo 3.0 imports the logger from where it was until lightning 2.6.3; the class of later versions raises an error.
    with patch.object(loggers, "NeptuneLogger", neptune.NeptuneLogger, create=True), _deferred("pandas"):
        from nemo.utils import exp_manager

    return exp_manager


@contextmanager
def _deferred(name: str) -> Iterator[None]:
    """Let modules that are imported in the block have a package that is imported when they use it."""
    if name in sys.modules:
        yield
        return
    deferred: Any = ModuleType(name)

    def load(attribute: str) -> Any:
        if sys.modules.get(name) is deferred:
            del sys.modules[name]
        return getattr(import_module(name), attribute)

    deferred.__getattr__ = load
    sys.modules[name] = deferred
    try:
        yield
    finally:
        if sys.modules.get(name) is deferred:
            del sys.modules[name]


def _execute(package: Any, attribute: str) -> Any:
    del package.__getattr__
    package.__spec__.loader.exec_module(package)
    return getattr(package, attribute)

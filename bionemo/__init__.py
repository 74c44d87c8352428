# SPDX-License-Identifier: Apache-2.0
"""Pretrain and apply biomolecular language models: `bionemo.load("esm2nv.nemo").embed("MKTAYIAKQR")`."""

from typing import TYPE_CHECKING, Any

from bionemo.common.cpu import limit_onednn
from bionemo.common.errors import UserError
from bionemo.common.openmp import limit_spinning
from bionemo.common.version import __version__

if TYPE_CHECKING:
    from bionemo.evaluation.evaluate import evaluate
    from bionemo.inference.load import load

__all__ = ["UserError", "__version__", "evaluate", "load"]

# before torch is loaded, in every process that imports this package
limit_onednn()
limit_spinning()


def __getattr__(name: str) -> Any:
    """Import what needs torch on first access, so that commands report user errors before torch is loaded."""
    if name == "load":
        from bionemo.inference.load import load

        return load
    if name == "evaluate":
        from bionemo.evaluation.evaluate import evaluate

        return evaluate
    raise AttributeError(f"module 'bionemo' has no attribute {name!r}")

# SPDX-License-Identifier: Apache-2.0
"""NeMo's classes. They import one-logger 2.3.1, whose trainer has not the signatures of lightning 2.6: not checked."""

from importlib import import_module
from unittest.mock import patch

with patch.object(import_module("overrides.overrides"), "ensure_signature_is_compatible"):
    from nemo.core import ModelPT
    from nemo.core.connectors.save_restore_connector import SaveRestoreConnector
    from nemo.core.optim import lr_scheduler

__all__ = ["ModelPT", "SaveRestoreConnector", "lr_scheduler"]

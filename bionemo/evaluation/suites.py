# SPDX-License-Identifier: Apache-2.0
"""The suites of `bionemo evaluate`."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from bionemo.common.errors import UserError
from bionemo.evaluation.contacts import Contacts
from bionemo.evaluation.labelled import Flip, MoleculeNet
from bionemo.evaluation.loss import Loss
from bionemo.evaluation.proteingym import ProteinGym
from bionemo.evaluation.tasks import Suite

SUITES: dict[str, type[Suite]] = {suite.name: suite for suite in (ProteinGym, Flip, Contacts, Loss, MoleculeNet)}


def open_suite(name: str, data: Path, settings: Mapping[str, Any]) -> Suite:
    """Return a suite with these data and settings.

    Raises:
        UserError: if the suite or a setting is unknown.
    """
    if name not in SUITES:
        raise UserError(f"there is no suite {name!r}: choose from {', '.join(SUITES)}")
    known = [field.name for field in fields(SUITES[name]) if field.name != "data"]
    for key in settings:
        if key not in known:
            raise UserError(f"{name} has no setting {key!r}, but {', '.join(known) or 'none'}: remove it")
    return SUITES[name](data, **settings)

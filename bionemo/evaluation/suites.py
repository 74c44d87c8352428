# SPDX-License-Identifier: Apache-2.0
"""The suites of `bionemo evaluate`, and YAML files that list several."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import yaml

from bionemo.common.errors import UserError
from bionemo.common.regular import require_regular
from bionemo.evaluation.contacts import Contacts
from bionemo.evaluation.labelled import Flip, MoleculeNet
from bionemo.evaluation.loss import Loss
from bionemo.evaluation.proteingym import ProteinGym
from bionemo.evaluation.tasks import Suite, is_file_name

SUITES: dict[str, type[Suite]] = {suite.name: suite for suite in (ProteinGym, Flip, Contacts, Loss, MoleculeNet)}
ALL = "all"


def open_suites(name: str, data: Path | None, settings: Mapping[str, Any]) -> dict[str, Suite]:
    """Return the suites that the user wants, by their names in the report.

    Args:
        name: a suite; `all`, for each suite with a folder of its name in `data`; or a YAML file with a list of suites,
            each with its `suite`, `data` (relative to the file) and settings, and a `name` if a suite occurs twice.
        data: data of the suite, or their folder; None for a YAML file.
        settings: settings of the suite.

    Raises:
        UserError: if a suite, a setting or a file is unknown or invalid.
    """
    if name.endswith((".yaml", ".yml")):
        if data is not None or settings:
            raise UserError(f"{name} contains the data and settings of its suites: write them there, and omit others")
        return _read_list(Path(name))
    if data is None:
        raise UserError(f"the data of {name} are missing: add --data")
    if name == ALL:
        found = {each: data / each for each in SUITES if (data / each).is_dir()}
        if not found:
            raise UserError(f"{data} has no folder named {' or '.join(SUITES)}: create one for each suite")
        if settings:
            raise UserError(f"{', '.join(settings)} does not apply to all suites: list the suites in a YAML file")
        return {each: _create(each, path, {}, "all") for each, path in found.items()}
    return {name: _create(name, data, settings, "the command line")}


def _create(name: str, data: Path, settings: Mapping[str, Any], where: str) -> Suite:
    """Create a suite; `where` names the origin of the settings in messages."""
    if name not in SUITES:
        raise UserError(f"{where}: there is no suite {name!r}: choose from {', '.join(SUITES)}")
    known = {field.name: field.default for field in fields(SUITES[name]) if field.default is not MISSING}
    for key, value in settings.items():
        if key not in known:
            raise UserError(f"{where}: {name} has no setting {key!r}, but {', '.join(known) or 'none'}: remove it")
        if type(value) is not type(known[key]):
            raise UserError(f"{where}: {name} has {key}: {value!r}, expected a value such as {known[key]!r}")
    return SUITES[name](data, **settings)


def _read_list(path: Path) -> dict[str, Suite]:
    try:
        require_regular(path)
        entries = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check the path") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path} is not a list: write entries such as '- {{suite: proteingym, data: ProteinGym}}'")
    found: dict[str, Suite] = {}
    for number, entry in enumerate(entries, 1):
        where = f"{path}, entry {number}"
        match entry:
            case {"suite": str(suite), "data": str(data), **rest}:
                settings = {str(key): value for key, value in rest.items()}
                name = str(settings.pop("name", suite))
            case _:
                raise UserError(f"{where} has no `suite` and `data`: write {{suite: proteingym, data: ProteinGym}}")
        if not is_file_name(name):
            raise UserError(f"{where}: the name {name!r} is not a file name of letters, digits, '_', '-' and '.'")
        if name in found:
            raise UserError(f"{where} has the name {name!r} of an earlier entry: give it another `name`")
        found[name] = _create(suite, path.parent / Path(data).expanduser(), settings, where)
    return found

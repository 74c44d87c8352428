# SPDX-License-Identifier: Apache-2.0
"""What Hydra, OmegaConf and the YAML parser say on many lines, said on one."""

import yaml
from hydra.errors import MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from bionemo.config.hints import did_you_mean
from bionemo.config.paths import Source, options


def explain(error: Exception, where: Source) -> str:
    """Say on one line why a config could not be composed."""
    if isinstance(error, MissingConfigException):
        return _missing_config(error, where)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}: {error.problem}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if lines[0].startswith("You must specify"):  # "..., e.g, model=<OPTION>", then the options, one a line
        return f"{lines[0].partition(',')[0]}: one of {', '.join(o for o in lines[2:] if not o.startswith('_'))}"
    if lines[0].startswith("Multiple values for"):  # a group that is there already was given with a +
        return f"{lines[0].split()[3].rstrip('.')} has a value already: choose another without the +"
    if isinstance(error.__cause__, OmegaConfBaseException):
        lines[1:] = str(error.__cause__).splitlines()[:1]
    return " ".join(lines[:3])


def explain_interpolation(error: OmegaConfBaseException) -> str:
    """Say on one line why a `${...}` has no value."""
    text = str(error.msg or error).splitlines()[0]
    if "Environment variable" in text:
        variable = text.partition("Environment variable '")[2].partition("'")[0]
        return f"environment variable {variable} is not set"
    return text.partition(" raised while resolving interpolation: ")[2] or text


def _missing_config(error: MissingConfigException, where: Source) -> str:
    missing = str(error.missing_cfg_file).removesuffix(".yaml")
    group, _, name = missing.rpartition("/")
    if not group:
        known = sorted({name for directory in (where.directory, *where.extra) for name in options(directory)})
        place = f"in {where.directory}" if missing == where.name else f"for the defaults of '{where.name}'"
        return f"no config '{missing}' {place}{did_you_mean(missing, known)}: there are {', '.join(known) or 'none'}"
    known = [option for option in error.options or () if not option.startswith("_")]
    if not known:
        return f"no config '{missing}': there is no group '{group}'"
    return f"no {group} '{name}'{did_you_mean(name, known)}: there are {', '.join(known)}"

"""Stub programs that record their calls, in place of those that start runs."""

import json
import sys
from pathlib import Path

_STUB = """\
#!{python}
import json, os, sys
if sys.argv[1:] == ["--version"]:
    sys.exit(print({version!r}))
with open({calls!r}, "a") as calls:
    calls.write(json.dumps([{name!r}, *sys.argv[1:]]) + "\\n")
{rest}
"""


class Stubs:
    """A directory of stubs to put in front of PATH.

    Attributes:
        directory: path of the directory.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self._calls = directory, directory / "calls.jsonl"
        directory.mkdir(parents=True)

    def add(self, name: str, rest: str = "", version: str = "mpirun (Open MPI) 4.1.4") -> None:
        """Add a program; `rest` is Python code that it runs after recording the call, unless it prints its version."""
        path = self.directory / name
        text = _STUB.format(python=sys.executable, calls=str(self._calls), name=name, rest=rest, version=version)
        path.write_text(text)
        path.chmod(0o755)

    def calls(self, name: str = "") -> list[list[str]]:
        """Return all calls in order, each with the program's name first."""
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        return [call for call in map(json.loads, lines) if not name or call[0] == name]

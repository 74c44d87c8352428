# SPDX-License-Identifier: Apache-2.0
"""The fastest implementation is measured once per machine, and all processes of a user make the same choice."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from bionemo.common import autotune as module
from bionemo.common.autotune import autotune
from tests.conftest import ROOT

CPU = "model name\t: A\nstepping\t: 1\nflags\t\t: fpu sse\ncpu MHz\t\t: 1000\n"


class Clock:
    """Candidates that take given times, which advance the clock of the measurement."""

    def __init__(self, **seconds: list[float]) -> None:
        self.now = 100.0
        self.seconds = seconds
        self.calls: list[str] = []
        self.candidates: dict[str, Callable[[], object]] = {name: self._candidate(name) for name in seconds}

    def _candidate(self, name: str) -> Callable[[], None]:
        remaining = iter(self.seconds[name])

        def run() -> None:
            self.calls.append(name)
            self.now += next(remaining)

        return run


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of the choices, which does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "bionemo" / "autotune"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return three candidates; the second has the shortest time after the first run, but not the shortest total."""
    clock = Clock(a=[1.0, 3.0, 3.0, 3.0], b=[50.0, 8.0, 2.0, 8.0], c=[0.5, 4.0, 4.0, 2.5])
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def never() -> None:
    raise AssertionError("measured again")


STORED: dict[str, Callable[[], object]] = {"a": never, "b": never, "c": never}


def test_the_shortest_time_after_a_first_run_decides(directory: Path, clock: Clock) -> None:
    assert autotune("product", "1", clock.candidates) == "b"
    assert clock.calls == 4 * ["a", "b", "c"]
    [file] = directory.iterdir()  # without temporary files
    assert file.name.startswith("product-")
    assert file.read_text() == "b\n"
    assert autotune("product", "1", STORED) == "b"


@pytest.mark.parametrize("value", [None, ""])
def test_choices_are_stored_in_the_home_directory_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, value: str | None
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if value is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
    autotune("product", "1", clock.candidates)
    assert [file.read_text() for file in (tmp_path / ".cache" / "bionemo" / "autotune").iterdir()] == ["b\n"]


def test_another_process_makes_the_same_choice(directory: Path, clock: Clock) -> None:
    assert autotune("product", "1", clock.candidates) == "b"
    code = (
        "import sys; from bionemo.common.autotune import autotune; "
        "print(autotune('product', '1', dict.fromkeys('abc', lambda: sys.exit('measured again')))); "
        "print({'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "b\nset()\n"


@pytest.fixture
def cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a file that replaces /proc/cpuinfo."""
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\n{CPU}\nprocessor\t: 1\n{CPU}")
    monkeypatch.setattr(module, "open", lambda name, **options: path.open(**options), raising=False)
    yield path


@pytest.mark.parametrize(
    ("name", "version", "candidates", "old", "new"),
    [
        ("product", "2", "abc", "", ""),
        ("sum", "1", "abc", "", ""),
        ("product", "1", "ab", "", ""),
        ("product", "1", "abc", ": A\n", ": B\n"),
        ("product", "1", "abc", ": fpu sse\n", ": fpu sse avx\n"),
    ],
    ids=["version", "name", "candidates", "model", "flags"],
)
def test_other_conditions_are_measured_again(
    directory: Path, clock: Clock, cpuinfo: Path, name: str, version: str, candidates: str, old: str, new: str
) -> None:
    assert autotune("product", "1", clock.candidates) == "b"
    if old:
        cpuinfo.write_text(cpuinfo.read_text().replace(old, new))
    calls: list[str] = []
    functions = {each: partial(calls.append, each) for each in candidates}
    assert autotune(name, version, functions) in candidates
    assert set(calls) == set(candidates)
    assert len(list(directory.iterdir())) == 2


def test_clock_rate_and_other_cores_do_not_matter(directory: Path, clock: Clock, cpuinfo: Path) -> None:
    assert autotune("product", "1", clock.candidates) == "b"
    cpuinfo.write_text(f"processor\t: 3\n{CPU.replace('1000', '1234')}\nprocessor\t: 4\nmodel name\t: B\n")
    assert autotune("product", "1", STORED) == "b"


def test_a_missing_description_of_the_cpu_is_tolerated(directory: Path, clock: Clock, cpuinfo: Path) -> None:
    cpuinfo.unlink()
    assert autotune("product", "1", clock.candidates) == "b"
    assert autotune("product", "1", STORED) == "b"


@pytest.mark.parametrize("place", ["/proc/none", "file"])
def test_nothing_is_measured_if_the_choice_cannot_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / place))
    assert autotune("product", "1", STORED) == "a"


@pytest.mark.parametrize("content", [b"", b"d\n", b"a b\n", b"\xff\xfe\0", b"b" * 5000, b"c\nb\n"])
def test_the_first_candidate_replaces_unknown_content(directory: Path, clock: Clock, content: bytes) -> None:
    autotune("product", "1", clock.candidates)
    [file] = directory.iterdir()
    file.write_bytes(content)
    assert autotune("product", "1", STORED) == "a"
    assert file.read_bytes() == content


def test_a_directory_in_place_of_the_file_is_tolerated(directory: Path, clock: Clock) -> None:
    autotune("product", "1", clock.candidates)
    [file] = directory.iterdir()
    file.unlink()
    file.mkdir()
    assert autotune("product", "1", STORED) == "a"


def test_the_first_stored_choice_wins(directory: Path, clock: Clock) -> None:
    """While this process measures, another one stores its choice."""

    def advance(seconds: float) -> None:
        clock.now += seconds

    others = {name: partial(advance, 1.0 if name == "c" else 9.0) for name in "abc"}
    first = clock.candidates["a"]

    def interrupted() -> None:
        if len(clock.calls) == 3:
            assert autotune("product", "1", others) == "c"
        first()

    assert autotune("product", "1", clock.candidates | {"a": interrupted}) == "c"
    [file] = directory.iterdir()
    assert file.read_text() == "c\n"


CONCURRENT = """
import sys, time
from bionemo.common.autotune import autotune
own = sys.argv[1]
print("ready", flush=True)
sys.stdin.readline()
print(autotune("product", "1", {name: lambda name=name: time.sleep(0 if name == own else 0.01) for name in "abcd"}))
"""


def test_concurrent_processes_agree(directory: Path) -> None:
    """Each of four processes measures another candidate as the fastest."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CONCURRENT, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, cwd=ROOT,
        )
        for name in "abcd"
    ]  # fmt: skip
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    outputs = [process.communicate("go\n")[0] for process in processes]
    [file] = directory.iterdir()
    assert set(outputs) == {file.read_text()}
    assert file.read_text().strip() in "abcd"


def test_a_user_without_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", missing)
    assert autotune("product", "1", {"a": int}) == "a"

# SPDX-License-Identifier: Apache-2.0
"""Run our benchmark and a peer's alternately; print medians, ranges and the ratio.

    python compare.py --repeats 5 --ours 'python train_ours.py' --peer '.venv-peers/bin/python train_hf.py'

Each command runs in its own process and prints one JSON line {"value": number, "unit": text}; higher is better.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys

import bionemo  # noqa: F401  # limits oneDNN for both commands, where the CPU needs it


def measure(command: str) -> tuple[float, str]:
    """Run a command and parse its last line."""
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {command} failed:\n{done.stderr[-2000:]}")
    reading = json.loads(done.stdout.strip().splitlines()[-1])
    return float(reading["value"]), str(reading["unit"])


def summary(values: list[float]) -> str:
    """Format median and range."""
    return f"{statistics.median(values):,.4g} ({min(values):,.4g} to {max(values):,.4g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", required=True)
    parser.add_argument("--peer", required=True)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()

    ours, peer, unit = [], [], ""
    for _ in range(options.repeats):
        value, unit = measure(options.ours)
        ours.append(value)
        peer.append(measure(options.peer)[0])
        print(f"ours {ours[-1]:,.4g}  peer {peer[-1]:,.4g}", file=sys.stderr)
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    print(f"ours  {summary(ours)} {unit}")
    print(f"peer  {summary(peer)} {unit}")
    print(f"ratio {summary(ratios)}")


if __name__ == "__main__":
    main()

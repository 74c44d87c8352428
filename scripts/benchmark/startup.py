# SPDX-License-Identifier: Apache-2.0
"""Time `pretrain.py --help` and a misspelt key as whole processes, and report whether torch was imported."""

import statistics
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "protein" / "esm2nv" / "pretrain.py"


def main() -> None:
    for arguments in (["--help"], ["--cfg", "job", "model.data.dataset_path=x"], ["model.hiden_size=1"]):
        seconds = []
        for _ in range(7):
            start = time.perf_counter()
            subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, check=False)
            seconds.append(time.perf_counter() - start)
        command = [sys.executable, "-X", "importtime", str(SCRIPT), *arguments]
        imports = subprocess.run(command, capture_output=True, text=True, check=False).stderr
        torch = "torch imported" if "| torch\n" in imports else "no torch"
        median, low, high = statistics.median(seconds), min(seconds), max(seconds)
        print(f"{' '.join(arguments):45} {median:.2f} s ({low:.2f} to {high:.2f}), {torch}")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""What MegaMolBART makes of the molecules in a file: `python infer.py --help`."""

from bionemo.predict import main

if __name__ == "__main__":
    main("infer")

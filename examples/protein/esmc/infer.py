# SPDX-License-Identifier: Apache-2.0
"""What ESMC makes of the sequences in a file: `python infer.py --help`."""

from bionemo.predict import main

if __name__ == "__main__":
    main("infer")

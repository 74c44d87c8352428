# SPDX-License-Identifier: Apache-2.0
"""`python -m bionemo.analysis`: the same as `bionemo analysis`."""

from bionemo.cli.analysis import main

if __name__ == "__main__":
    main()

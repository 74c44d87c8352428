# SPDX-License-Identifier: Apache-2.0
"""`python -m bionemo.cli`: the same as `bionemo`."""

from bionemo.cli.main import main

if __name__ == "__main__":
    main()

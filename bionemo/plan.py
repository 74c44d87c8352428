# SPDX-License-Identifier: Apache-2.0
"""`python -m bionemo.plan`: the same as `bionemo plan`."""

from bionemo.cli.plan import main

__all__ = ["main"]

if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""`python -m bionemo.preprocess`: the same as `bionemo preprocess`."""

from bionemo.cli.preprocess import main

if __name__ == "__main__":
    main()

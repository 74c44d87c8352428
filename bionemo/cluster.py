# SPDX-License-Identifier: Apache-2.0
"""`python -m bionemo.cluster`: the same as `bionemo cluster`."""

from bionemo.cli.cluster import main

if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""`python -m bionemo.launch`: the same as `bionemo launch`."""

from bionemo.cli.launch import main

if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""`python -m bionemo.predict`: the same as `bionemo predict`."""

from bionemo.cli.predict import main

if __name__ == "__main__":
    main()

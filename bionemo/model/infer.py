# SPDX-License-Identifier: Apache-2.0
"""`python -m bionemo.model.infer`: BioNeMo v1's name of `bionemo predict`."""

from bionemo.cli.predict import main

if __name__ == "__main__":
    main()

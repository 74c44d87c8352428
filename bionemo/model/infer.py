# SPDX-License-Identifier: Apache-2.0
"""`python -m bionemo.model.infer`: the name of `bionemo predict` in BioNeMo v1."""

from bionemo.cli.predict import main

if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""`python -m bionemo.finetune`: the same as `bionemo finetune`."""

from bionemo.cli.finetune import main

if __name__ == "__main__":
    main()

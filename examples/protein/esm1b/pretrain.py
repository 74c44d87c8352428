# SPDX-License-Identifier: Apache-2.0
"""Pretrain ESM-1b: `python pretrain.py --help`."""

from bionemo.pretrain import main

if __name__ == "__main__":
    main("pretrain_esm1b_small")

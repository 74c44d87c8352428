# SPDX-License-Identifier: Apache-2.0
"""Pretrain ESMC: `python pretrain.py --help`."""

from bionemo.pretrain import main

if __name__ == "__main__":
    main("pretrain_esmc_300M")

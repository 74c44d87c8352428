# SPDX-License-Identifier: Apache-2.0
"""Pretrain ProtT5nv: `python pretrain.py --help`."""

from bionemo.pretrain import main

if __name__ == "__main__":
    main("pretrain_small")

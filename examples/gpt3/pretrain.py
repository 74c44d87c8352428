# SPDX-License-Identifier: Apache-2.0
"""Pretrain GPT-3: `python pretrain.py --help`."""

from bionemo.pretrain import main

if __name__ == "__main__":
    main("pretrain_gpt3_126m")

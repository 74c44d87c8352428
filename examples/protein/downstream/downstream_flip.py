# SPDX-License-Identifier: Apache-2.0
"""Fine-tune on a task of FLIP, or prepare its data with `do_training=False`: `python downstream_flip.py --help`."""

from bionemo.finetune import main

if __name__ == "__main__":
    main("downstream_flip_sec_str")

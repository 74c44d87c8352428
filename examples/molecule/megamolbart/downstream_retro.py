# SPDX-License-Identifier: Apache-2.0
"""Retrosynthesis with MegaMolBART, from products to reactants: `python downstream_retro.py --help`."""

from bionemo.pretrain import main

if __name__ == "__main__":
    main("downstream_retro_uspto50k")

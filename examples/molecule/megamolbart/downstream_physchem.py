# SPDX-License-Identifier: Apache-2.0
"""Learn a measured property of molecules; `python downstream_physchem.py --help`."""

from bionemo.finetune import main

if __name__ == "__main__":
    main("finetune_config")

# SPDX-License-Identifier: Apache-2.0
"""`python -m bionemo.pretrain`: the same as `bionemo pretrain`."""

from bionemo.cli.pretrain import main

if __name__ == "__main__":
    main()

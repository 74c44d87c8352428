# SPDX-License-Identifier: Apache-2.0
"""python -m bionemo.model.infer: what v1 called `python -m bionemo.predict`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("bionemo.predict", run_name="__main__", alter_sys=True)

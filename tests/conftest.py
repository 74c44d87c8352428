# SPDX-License-Identifier: Apache-2.0
"""What all tests share."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as interop/quiet.py does, before torch is imported

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "protein"

# SPDX-License-Identifier: Apache-2.0
"""What a trained model tells of proteins: `variants` without measurements, `contacts`, and `maps` of many."""

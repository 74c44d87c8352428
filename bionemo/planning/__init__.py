# SPDX-License-Identifier: Apache-2.0
"""What a run will need, by formula: parameters, memory, FLOPs, time. Imports no torch, needs no data and no GPU."""

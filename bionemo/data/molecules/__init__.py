# SPDX-License-Identifier: Apache-2.0
"""Molecule and reaction datasets: SMILES reader, SMILES augmentation and text infilling."""

# SPDX-License-Identifier: Apache-2.0
"""Molecules as samples: SMILES, the forms in which one is read and written, and spans hidden of it."""

# SPDX-License-Identifier: Apache-2.0
"""Analysis of proteins with a trained model: zero-shot scores of variants, contacts, and maps of embeddings."""

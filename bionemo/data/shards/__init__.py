# SPDX-License-Identifier: Apache-2.0
"""CSV and FASTA files: file name patterns, indexes and random access to sequences."""

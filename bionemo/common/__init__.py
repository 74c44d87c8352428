# SPDX-License-Identifier: Apache-2.0
"""Code that every other package may use and that imports none of them: files, locks, redaction, the CPU."""

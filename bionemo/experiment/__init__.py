# SPDX-License-Identifier: Apache-2.0
"""Directory and loggers of a run, by NeMo exp_manager and Lightning."""

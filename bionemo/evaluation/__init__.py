# SPDX-License-Identifier: Apache-2.0
"""Evaluation of trained models: suites of tasks, their metrics, and reports."""

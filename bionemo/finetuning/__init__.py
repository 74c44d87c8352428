# SPDX-License-Identifier: Apache-2.0
"""Labelled tasks on top of a trained model: `task` reads them, `heads` answer them, `frozen` trains a head alone."""

# SPDX-License-Identifier: Apache-2.0
"""Labelled tasks: read the data, train a head on a frozen encoder (`linear_probe`) or the whole model (`finetune`)."""

# SPDX-License-Identifier: Apache-2.0
"""Protein datasets for masked language modelling and span corruption, and synthetic proteins."""

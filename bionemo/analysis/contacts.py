# SPDX-License-Identifier: Apache-2.0
"""Contact prediction from attention."""

from bionemo.inference.analysis.contacts import fit_contact_head, predict_contacts

__all__ = ["fit_contact_head", "predict_contacts"]

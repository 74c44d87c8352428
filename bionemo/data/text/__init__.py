# SPDX-License-Identifier: Apache-2.0
"""Text as samples: indexed corpora, several by weight, cut into rows; or text that is made up."""

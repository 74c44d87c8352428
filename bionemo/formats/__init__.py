# SPDX-License-Identifier: Apache-2.0
"""Files of models, read, written and recognized; see `detect.detect_format`."""

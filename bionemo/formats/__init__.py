# SPDX-License-Identifier: Apache-2.0
"""Files of models: .nemo archives and Hugging Face directories, read, written and recognized."""

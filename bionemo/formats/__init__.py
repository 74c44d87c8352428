# SPDX-License-Identifier: Apache-2.0
"""Files of models: .nemo archives and directories of Hugging Face and NeMo 2, read, written and recognized."""

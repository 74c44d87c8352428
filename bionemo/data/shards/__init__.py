# SPDX-License-Identifier: Apache-2.0
"""Files of records: which they are, where records lie in them, and those read in place."""

# SPDX-License-Identifier: Apache-2.0
"""The one exception meant for people."""


class UserError(Exception):
    """Something the user can mend: one line that says what is wrong, where, and what to do.

    Entry points print its text on one line and exit with status 1; every other exception is a defect of ours and
    keeps its traceback.
    """

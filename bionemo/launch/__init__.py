# SPDX-License-Identifier: Apache-2.0
"""Render and submit jobs (`cluster=`), test connections, start Ray workers and local processes."""

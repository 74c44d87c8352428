# SPDX-License-Identifier: Apache-2.0
"""Render and submit jobs (`cluster=`), and the processes of launchers: all-reduce check, Ray workers, local spawn."""

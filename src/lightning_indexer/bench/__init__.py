# SPDX-License-Identifier: Apache-2.0
"""Measurements: no number without a verified selection, necessary bytes and a roof measured in the same run."""

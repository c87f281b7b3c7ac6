# SPDX-License-Identifier: Apache-2.0
"""What this machine can do: what is there, what works and why not, proof, and figures."""

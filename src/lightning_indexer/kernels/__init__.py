# SPDX-License-Identifier: Apache-2.0
"""Triton kernels. Importing a module of this package imports Triton; nothing outside `triton_backend` does so.

In kernels UPPER names are compile-time constants and lower ones run-time arguments. Every pointer carries its shape.
"""

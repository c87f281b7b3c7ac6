# SPDX-License-Identifier: Apache-2.0
"""For vLLM: a plugin that selects our indexer (`plugin`), and the operators that its MiniMax-M3 modules document (`ops`).

Nothing here imports vLLM but `indexer` and `nvfp4`, which only code that runs inside an engine imports.
"""

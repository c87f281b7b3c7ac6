# SPDX-License-Identifier: Apache-2.0
"""For vLLM: the operators that its MiniMax-M3 modules document (`ops`), and what the plugin `lightning_indexer_vllm` puts in.

Nothing here imports vLLM but `indexer` and `nvfp4`, which only code that runs inside an engine imports.
"""

# SPDX-License-Identifier: Apache-2.0
"""The entry point that vLLM loads in each of its processes. It waits for the model's modules, then chooses the indexer there.

vLLM asks `select_indexer_impl_cls` for the class that selects the blocks of a sparse layer, and on ROCm
`select_msa_indexer_impl_cls` first. Both are replaced once their modules have been imported; until then an import costs one
comparison more. Neither does anything new unless `minimax_m3_indexer_cp` or our own option asks for it.

A module of its own: vLLM loads it whatever model is served, and `lightning_indexer` takes a while to import.
"""

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

COMMON = "vllm.models.minimax_m3.common.indexer"
MSA = "vllm.models.minimax_m3.amd.indexer_msa"


def register() -> None:
    """Have our indexer chosen where it is asked for. May be called any number of times."""
    for name, install in INSTALLERS.items():
        if name in sys.modules:
            install(sys.modules[name])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def install_common(module: ModuleType) -> None:
    """Replace the choice of `vllm.models.minimax_m3.common.indexer`."""
    original = getattr(module, "select_indexer_impl_cls", None)

    def select_indexer_impl_cls(*arguments: Any, **keywords: Any) -> Any:
        from lightning_indexer.vllm.indexer import choose

        chosen = choose(module, **keywords)
        if chosen is None and original is not None:
            return original(*arguments, **keywords)
        return chosen

    _replace(module, "select_indexer_impl_cls", original, select_indexer_impl_cls)


def install_msa(module: ModuleType) -> None:
    """Replace the choice of `vllm.models.minimax_m3.amd.indexer_msa`: where ours is asked for, it must not be taken."""
    original = getattr(module, "select_msa_indexer_impl_cls", None)

    def select_msa_indexer_impl_cls(*arguments: Any, **keywords: Any) -> Any:
        from lightning_indexer.vllm.indexer import asked

        return original(*arguments, **keywords) if original is not None and not asked() else None

    _replace(module, "select_msa_indexer_impl_cls", original, select_msa_indexer_impl_cls)


def _replace(module: ModuleType, name: str, original: Callable[..., Any] | None, ours: Callable[..., Any]) -> None:
    if not hasattr(original, "lightning_indexer"):
        replacement: Any = ours if original is None else functools.wraps(original)(ours)
        replacement.lightning_indexer = True
        setattr(module, name, replacement)


INSTALLERS = {COMMON: install_common, MSA: install_msa}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the model's modules as the finders behind it do, and has them changed once they have run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in INSTALLERS:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, INSTALLERS[name])
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Another loader, and what to do with the module when that is done."""

    def __init__(self, loader: Any, install: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._install = install

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._install(module)

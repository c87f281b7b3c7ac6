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
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

COMMON = "vllm.models.minimax_m3.common.indexer"
MSA = "vllm.models.minimax_m3.amd.indexer_msa"
MARK = "lightning_indexer"  # attribute of a function that is ours


def register() -> None:
    """Have our indexer chosen where it is asked for. May be called any number of times."""
    for name, install in INSTALLERS.items():
        if name in sys.modules:
            install(sys.modules[name])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def install_common(module: ModuleType) -> None:
    """Replace the choice of `vllm.models.minimax_m3.common.indexer`."""

    def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
        def select_indexer_impl_cls(*arguments: Any, **keywords: Any) -> Any:
            if not _asked():
                return original(*arguments, **keywords)
            from lightning_indexer.vllm import interface

            interface.check(module)
            from lightning_indexer.vllm.indexer import choose  # only now: a vLLM that differs may not even import it

            return choose(*arguments, **keywords)

        return select_indexer_impl_cls

    _replace(module, "select_indexer_impl_cls", replacement)


def install_msa(module: ModuleType) -> None:
    """Replace the choice of `vllm.models.minimax_m3.amd.indexer_msa`: where ours is asked for, there is nothing to choose."""

    def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
        def select_msa_indexer_impl_cls(*arguments: Any, **keywords: Any) -> Any:
            return None if _asked() else original(*arguments, **keywords)

        return select_msa_indexer_impl_cls

    _replace(module, "select_msa_indexer_impl_cls", replacement)


def _asked() -> bool:
    """Whether the engine that is being built is to use our indexer."""
    from vllm.config import get_current_vllm_config

    from lightning_indexer.vllm.options import asked

    return asked(get_current_vllm_config())


def _replace(module: ModuleType, name: str, replacement: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put another function in the place of a module's, once."""
    original = getattr(module, name, None)
    if original is None:
        told = "lightning-indexer cannot be selected: %s of this vLLM has no %s"
        logging.getLogger("vllm.lightning_indexer").warning(told, module.__name__, name)
    elif not hasattr(original, MARK):
        ours = functools.wraps(original)(replacement(original))
        setattr(ours, MARK, True)
        setattr(module, name, ours)


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

# SPDX-License-Identifier: Apache-2.0
"""All kernels compiled beside the other tests, in a process of its own: an interpreting one cannot compile."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import pytest

SCRIPT = pathlib.Path(__file__).with_name("compile_kernels.py")


class Compiling:
    """A run of the script, begun when this is made."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = pathlib.Path(self._folder.name)
        self._told, self._rows = folder / "told", folder / "rows.json"
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment["TRITON_CACHE_DIR"] = str(folder / "cache")
        command = [sys.executable, str(SCRIPT), "--json", str(self._rows)]
        with self._told.open("w") as told:
            self._process = subprocess.Popen(command, env=environment, stdout=told, stderr=subprocess.STDOUT)

    def rows(self) -> list[dict[str, Any]]:
        """What the script says of each launch, once it has ended."""
        self._process.wait()
        told = self._told.read_text()
        assert self._rows.exists(), told[-6000:]
        print(told)  # the table, with pytest -s
        return json.loads(self._rows.read_text())

    def stop(self) -> None:
        """End it, done or not."""
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()


COMPILING = pytest.StashKey[Compiling]()  # of the session that has begun one

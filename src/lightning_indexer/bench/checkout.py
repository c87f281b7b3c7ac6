# SPDX-License-Identifier: Apache-2.0
"""The checkout that this package runs from: its commits, and their code.

An installed copy has none, though it may lie in the folders of another repository.
"""

import subprocess
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
PLACE = "src/lightning_indexer/"  # of the package in its checkout


def find_commit(name: str) -> str | None:
    """The hash of a commit of the checkout; None if it has no such commit, or there is no checkout."""
    asked = ["git", "-C", str(PACKAGE), "rev-parse", "--show-prefix", "--verify", "--quiet", f"{name}^{{commit}}"]
    try:
        place, commit = _run(asked).decode().splitlines()
    except ValueError:
        return None
    return commit if place == PLACE else None


def unpack_sources(commit: str, folder: Path) -> None:
    """Write what lies under `src` in a commit of the checkout into a folder.

    Raises:
        ValueError: the commit has no `src`, or git or tar fails: what it told.
    """
    root = PACKAGE.parents[1]  # of a tree git archives only what lies below the folder that it is asked in
    packed = _run(["git", "-C", str(root), "archive", "--format=tar", f"{commit}:src"])
    _run(["tar", "-x", "-C", str(folder)], packed)


def _run(command: list[str], given: bytes = b"") -> bytes:
    """What a command prints; a ValueError if it fails."""
    try:
        return subprocess.run(command, input=given, capture_output=True, check=True).stdout
    except OSError as error:
        raise ValueError(f"{command[0]}: {error.strerror}") from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").splitlines() or [f"exit code {error.returncode}"]
        raise ValueError(f"{command[0]}: {lines[-1]}") from error

# SPDX-License-Identifier: Apache-2.0
"""What commands share: one line for an error, progress, files that are not overwritten."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

INPUT_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
OUTPUT_FILE = click.Path(dir_okay=False, path_type=Path)


class InputError(click.ClickException):
    """What the caller gave cannot be used: one line on stderr, exit code 2."""

    exit_code = 2


class PlainCommand(click.Command):
    """A command that tells a wrong option in one line."""

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        try:
            return super().make_context(*arguments, **options)
        except click.UsageError as error:
            raise InputError(error.format_message()) from error


class Progress:
    """One line on stderr that says what is going on: rewritten on a terminal, else one line per kind of work."""

    def __init__(self) -> None:
        self.label = ""

    def __call__(self, label: str, done: int, total: int) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r\033[K{label} {done}/{total}", nl=False, err=True)
        elif label != self.label:
            click.echo(f"{label} ...", err=True)
        self.label = label

    def close(self) -> None:
        if sys.stderr.isatty():
            click.echo("\r\033[K", nl=False, err=True)


def output_options(*options: Callable[..., Any]) -> Callable[..., Any]:
    """The given options of files to write, and `--force`."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        command = click.option("--force", is_flag=True, help="Overwrite files that exist.")(command)
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def json_option() -> Callable[..., Any]:
    """`--json PATH`."""
    return click.option("--json", "json_path", type=OUTPUT_FILE, help="Write the result to this file, too.")


def check_writable(force: bool, *paths: Path | None) -> None:
    """Refuse, before any work, to overwrite a file or to write into a folder that is not there.

    Raises:
        InputError: names the file.
    """
    for path in paths:
        if path is not None and path.exists() and not force:
            raise InputError(f"{path} exists; --force overwrites it")
        if path is not None and not path.parent.is_dir():
            raise InputError(f"{path}: there is no folder {path.parent}")


def write_json(path: Path | None, told: Any) -> None:
    """Write `told`, if there is a path."""
    if path is not None:
        path.write_text(json.dumps(told, indent=1) + "\n")

# SPDX-License-Identifier: Apache-2.0
"""Aligned text for the terminal."""


def table(rows: list[list[str]]) -> str:
    """Rows of cells, the first row the heads, as aligned text: the first column left, the others right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)

"""Words for people: sizes, counts and text tables."""

from __future__ import annotations

from collections.abc import Sequence


def size(nbytes: int) -> str:
    """Bytes for people, in powers of 1024."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def count(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def rows_of(pairs: Sequence[tuple[str, str]]) -> str:
    """(name, text) pairs as two columns."""
    width = max(18, *(len(name) + 1 for name, _ in pairs))
    return "\n".join(f"{name:<{width}}{text}" for name, text in pairs)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text columns: the first to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells))
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])

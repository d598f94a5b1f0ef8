"""The tutorials as notebooks, by jupytext: `python scripts/notebooks.py [OUT]` (default build/notebooks).

Python blocks become cells, in order; blocks of output and of shell commands stay text. A notebook is one file: pictures are inside it,
and links to other pages, which would lead nowhere from where it is kept, become their words.
"""

from __future__ import annotations

import base64
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TYPES = {".png": "image/png", ".svg": "image/svg+xml"}


def pages() -> list[str]:
    """The tutorials in the site's navigation, and the first law."""
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    tutorials = next(section["Tutorials"] for section in nav if "Tutorials" in section)
    return ["start/first-law.md", *(path for entry in tutorials for path in entry.values())]


def notebook(page: Path) -> str:
    """The page as the text of an .ipynb file."""
    import jupytext

    text = page.read_text()
    for kind in ("text", "bash"):  # plain fences: jupytext would make cells of another language
        text = re.sub(rf"^```{kind}$", "```", text, flags=re.M)
    made = jupytext.reads(text, fmt="md")
    made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    for cell in made.cells:
        if cell.cell_type == "markdown":
            cell.source = alone(cell, page)
    return str(jupytext.writes(made, fmt="ipynb"))


def alone(cell: Any, page: Path) -> str:
    """The cell's text without anything that lies beside the page; pictures are attached to the cell."""

    def picture(found: re.Match[str]) -> str:
        file = (page.parent / found[2]).resolve()
        data = base64.b64encode(file.read_bytes()).decode()
        cell.setdefault("attachments", {})[file.name] = {TYPES[file.suffix]: data}
        return f"![{found[1]}](attachment:{file.name})"

    text = re.sub(r"!\[([^\]]*)\]\((?!https?:)([^)\s]+)\)", picture, cell.source)
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:)[^)\s]+\)", r"\1", text)


def main(out: Path) -> list[Path]:
    """Write every notebook; their paths, in the order of `pages`."""
    out.mkdir(parents=True, exist_ok=True)
    made = []
    for name in pages():
        path = out / f"{Path(name).stem}.ipynb"
        path.write_text(notebook(DOCS / name))
        made.append(path)
    return made


if __name__ == "__main__":
    for path in main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "notebooks"):
        print(path)

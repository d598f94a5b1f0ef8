"""The tutorials as notebooks, by jupytext: `python scripts/notebooks.py [OUT]` (default build/notebooks).

Python blocks become cells, in order; blocks of output and of shell commands stay text.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PAGES = (
    "quickstart.md",
    "tutorials/own-oracle.md",
    "tutorials/own-world.md",
    "tutorials/own-objective.md",
    "start/first-law.md",
)


def notebook(page: Path) -> str:
    """The page as the text of an .ipynb file."""
    import jupytext

    text = page.read_text()
    for kind in ("text", "bash"):  # plain fences: jupytext would make cells of another language
        text = re.sub(rf"^```{kind}$", "```", text, flags=re.M)
    made = jupytext.reads(text, fmt="md")
    made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return str(jupytext.writes(made, fmt="ipynb"))


def main(out: Path) -> list[Path]:
    """Write every notebook; their paths."""
    out.mkdir(parents=True, exist_ok=True)
    made = []
    for name in PAGES:
        path = out / f"{Path(name).stem}.ipynb"
        path.write_text(notebook(DOCS / name))
        made.append(path)
    return made


if __name__ == "__main__":
    for path in main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "build" / "notebooks"):
        print(path)

"""Assemble the manual and build it: `python scripts/build_site.py`, or `make docs`. Nothing is fetched.

Pages in docs/ also link to files beside it (examples, source, the README). A site holds none of them, so that each such file is copied
into it and the link led there. Tutorials are also put there as notebooks, to be downloaded. Afterwards every link, image and anchor of the built pages is followed, and nothing may point outside.
"""

from __future__ import annotations

import html.parser
import os
import re
import shutil
import subprocess
import sys
import urllib.parse
from pathlib import Path

import notebooks

ROOT = Path(__file__).parents[1]
DOCS, SOURCE, SITE = ROOT / "docs", ROOT / "build" / "manual", ROOT / "build" / "site"
FENCED = re.compile(r"(^```.*?^```[^\n]*$)", flags=re.S | re.M)
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")


def assemble() -> None:
    """docs/ with every link leading to something inside it."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(DOCS, SOURCE)
    for page in SOURCE.rglob("*.md"):
        original = DOCS / page.relative_to(SOURCE)
        parts = FENCED.split(page.read_text())
        parts[::2] = [
            LINK.sub(lambda m, o=original, p=page: m[1] + inside(m[2], o, p) + m[3], text) for text in parts[::2]
        ]
        page.write_text("".join(parts))
    for name, made in zip(notebooks.pages(), notebooks.main(SOURCE / "notebooks"), strict=True):
        page = SOURCE / name
        heading, _, rest = page.read_text().partition("\n")
        link = f'[Download as a notebook]({relative(made, page)}){{ download="{made.name}" }}'
        page.write_text(f"{heading}\n\n{link}\n{rest}")


def inside(target: str, original: Path, page: Path) -> str:
    """Where a link of a page leads in the assembled folder."""
    if re.match(r"[a-z]+:|#", target):
        return target
    path = target.partition("#")[0]
    there = (original.parent / path).resolve()
    if there.is_relative_to(DOCS):
        return target
    if there == ROOT / "README.md":
        return relative(SOURCE / "index.md", page)
    kept = SOURCE / "files" / there.relative_to(ROOT)
    if there.is_dir():  # a folder: its files by name
        kept = kept / "contents.txt"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text("".join(f"{p.relative_to(ROOT)}\n" for p in sorted(there.rglob("*")) if p.is_file()))
    else:
        kept = kept.with_name(kept.name + ".txt") if kept.suffix in (".md", ".py") else kept
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(there, kept)
    return relative(kept, page)


def relative(target: Path, page: Path) -> str:
    return Path(os.path.relpath(target, page.parent)).as_posix()


class Page(html.parser.HTMLParser):
    """The addresses and the anchors of a built page."""

    def __init__(self, text: str):
        super().__init__()
        self.addresses: list[tuple[str, str]] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        for name in ("id", "name"):
            if given.get(name):
                self.anchors.add(str(given[name]))
        if tag == "link" and given.get("rel") in ("canonical", "preconnect", "alternate"):
            return
        for name in ("href", "src"):
            if given.get(name):
                self.addresses.append((tag, str(given[name])))


def problems(site: Path) -> list[str]:
    """Links of the built pages that lead nowhere, and files that would be fetched from elsewhere."""
    pages = {p: Page(p.read_text()) for p in site.rglob("*.html")}
    found = []
    for path, page in pages.items():
        for tag, address in page.addresses:
            where = f"{path.relative_to(site)}: {address}"
            if re.match(r"https?:|//", address):
                if tag != "a":
                    found.append(f"{where} is fetched from elsewhere")
                continue
            if re.match(r"[a-z]+:", address) or path.name == "404.html":
                continue
            target, _, anchor = address.partition("#")
            target = urllib.parse.unquote(target.partition("?")[0])
            there = (path.parent / target).resolve() if target else path
            there = there / "index.html" if there.is_dir() else there
            if not there.exists():
                found.append(f"{where} leads nowhere")
            elif (
                anchor
                and there in pages
                and urllib.parse.unquote(anchor) not in pages[there].anchors | {"__codelineno"}
            ):
                found.append(f"{where} has no such anchor")
    for sheet in site.rglob("*.css"):
        found += [
            f"{sheet.relative_to(site)}: {a} is fetched from elsewhere"
            for a in re.findall(r"url\(\s*['\"]?(https?:[^)]+)", sheet.read_text())
        ]
    return found


def main() -> int:
    assemble()
    shutil.rmtree(SITE, ignore_errors=True)
    done = subprocess.run([sys.executable, "-m", "zensical", "build", "--clean"], cwd=ROOT, check=False)
    if done.returncode:
        return done.returncode
    found = problems(SITE)
    print("\n".join(found) if found else f"every link of {sum(1 for _ in SITE.rglob('*.html'))} pages leads somewhere")
    print(f"look at it with: python -m http.server -d {SITE.relative_to(ROOT)}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

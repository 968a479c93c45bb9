"""What mkdocs is told beyond mkdocs.yml: links that leave docs/, and formulas.

Pages link to source files and to README as readers of the checkout need it. On the site those files are pages below
``source/``; formulas in ``math`` fences become MathML, which browsers show without a script.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from html import unescape
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "pages_of_sources", "rewritten"]

ROOT = Path(__file__).resolve().parents[1]
_FENCE = re.compile(r"^(`{3,})(\w*)[^\n]*\n(.*?)^\1[ ]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_BLOCK = re.compile(r"<p>\.\. math::\s+(.*?)</p>", re.DOTALL)
_INLINE = re.compile(r":math:<code>(.*?)</code>", re.DOTALL)
_NAME = re.compile(r":(?:meth|class|func|data|attr|mod):<code>(.*?)</code>")
_LANGUAGES = {".py": "python", ".json": "json", ".yaml": "yaml", ".cpp": "cpp", ".sbatch": "sh"}


def on_files(files: Any, config: Any) -> Any:
    """Add a page for every file outside docs/ that a page links to."""
    from mkdocs.structure.files import File

    for path, text in pages_of_sources().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links and formulas of a page of docs/."""
    path = page.file.src_uri
    return markdown if path.startswith("source/") else rewritten(markdown, f"docs/{path}", path)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """What docstrings say in reStructuredText: formulas and names."""
    if page.file.src_uri != "api.md":
        return html
    html = _BLOCK.sub(lambda found: _formula(rf"\begin{{aligned}}{unescape(found[1])}\end{{aligned}}"), html)
    html = _INLINE.sub(lambda found: _formula(unescape(found[1]), "inline"), html)
    return _NAME.sub(lambda found: f"<code>{found[1].rpartition('.')[2]}</code>", html)


def rewritten(markdown: str, home: str, page: str) -> str:
    """A page's text with links to pages of the site, and formulas as MathML.

    Args:
        markdown: The text.
        home: The file it comes from, from the root of the checkout.
        page: Where it is on the site.
    """

    def link(found: re.Match[str]) -> str:
        return f"]({_on_the_site(found[1], home, page)})"

    return _outside_fences(markdown, lambda text: _LINK.sub(link, text))


def pages_of_sources() -> Mapping[str, str]:
    """Pages below source/ by their path, and their text."""
    pages: dict[str, str] = {}
    waiting = [(path, path.read_text()) for path in sorted((ROOT / "docs").rglob("*.md"))]
    while waiting:
        path, text = waiting.pop()
        for target in _leaving(text, path):
            name = _page_of(target)
            if name in pages:
                continue
            file = ROOT / target
            pages[name] = _as_page(file, target, name)
            if file.suffix == ".md":
                waiting.append((file, file.read_text()))
    return pages


def _leaving(text: str, path: Path) -> Iterator[str]:
    home = path.relative_to(ROOT).as_posix()
    plain = _FENCE.sub("", text)
    for link in _LINK.findall(plain):
        target = _target(link, home)
        if target is not None and not target.startswith("docs/"):
            yield target


def _target(link: str, home: str) -> str | None:
    """The linked file from the root of the checkout; None for addresses and places in the same page."""
    if link.startswith(("http", "#", "mailto:")):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(home), link.partition("#")[0]))


def _on_the_site(link: str, home: str, page: str) -> str:
    target = _target(link, home)
    if target is None:
        return link
    there = target.removeprefix("docs/") if target.startswith("docs/") else _page_of(target)
    place = link.partition("#")[2]
    return posixpath.relpath(there, posixpath.dirname(page) or ".") + (f"#{place}" if place else "")


def _page_of(target: str) -> str:
    return f"source/{target}" if target.endswith(".md") else f"source/{target}.md"


def _as_page(file: Path, target: str, name: str) -> str:
    front = "---\nsearch:\n  exclude: true\n---\n\n"
    if file.suffix == ".md":
        return front + rewritten(file.read_text(), target, name)
    if file.is_dir():
        names = sorted(path.name for path in file.iterdir() if not path.name.startswith(("_", ".")))
        return f"{front}# {target}\n\n" + "".join(f"- `{name}`\n" for name in names)
    fence = "`" * 6
    return f"{front}# {target}\n\n{fence}{_LANGUAGES.get(file.suffix, '')}\n{file.read_text()}{fence}\n"


def _outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), _formula(fence[3]) if fence[2] == "math" else fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])


def _formula(text: str, display: str = "block") -> str:
    from latex2mathml.converter import convert

    return f"\n{convert(text.strip(), display=display)}\n"

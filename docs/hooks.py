"""MkDocs hook: adds the pages that are generated from the code, and makes links that leave `docs/` work in the site."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from reference_pages import pages

DOCS = Path(__file__).parent
ROOT = DOCS.parent
RESULTS = ROOT / "benchmarks" / "results"
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Puts the generated pages into the navigation, before the explanations."""
    generated = [path for path in pages() if path.startswith("reference/")]
    groups: dict[str, list[Any]] = {}
    for path in generated:
        group = Path(path).parent.name
        groups.setdefault(group, []).append({Path(path).stem.replace("-", " "): path} if group != "reference" else path)
    reference = [*groups["reference"], {"Commands": groups["cli"]}, {"Python": groups["python"]}]
    at = next(number for number, entry in enumerate(config.nav) if "Explanation" in entry)
    decisions = sorted(f"decisions/{path.name}" for path in (DOCS / "decisions").glob("*.md"))
    results = [path for path in pages() if path.startswith("results/")]
    config.nav = [
        *config.nav[:at],
        {"Reference": reference},
        *config.nav[at:],
        {"Decisions": decisions},
        {"Measurements": results},
    ]
    return config


def on_files(files: Any, config: Any) -> Any:
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to benchmark results lead to their pages in the site; other files outside of `docs/` are named only."""
    uri = Path(page.file.src_uri)
    is_result = uri.parts[0] == "results"
    folder = RESULTS if is_result else DOCS / uri.parent

    def moved(link: re.Match[str]) -> str:
        text, target, anchor = link[1], (folder / link[2]).resolve(), link[3] or ""
        if target.is_relative_to(DOCS):
            return f"[{text}](../{target.relative_to(DOCS)}{anchor})" if is_result else link[0]
        if target.parent == RESULTS and target.suffix == ".md":
            return f"[{text}]({'../' * (len(uri.parts) - 1)}results/{target.name}{anchor})"
        name = f"`{target.relative_to(ROOT)}`"
        return name if text.strip("`") in name else f"{text} ({name})"

    return LINK.sub(moved, markdown)

"""Hooks of MkDocs (mkdocs.yml): pages from outside docs/, links that leave docs/, and GitHub's anchors.

The pages are written for the repository, where every link is a path. On the site a link to a page goes to that page,
and a link to another file goes to the repository if `repo_url` is set; otherwise the file's path is printed.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

# path in the repository -> path on the site
OUTSIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "quintet/bundled/README.md": "bundled.md",
    "quintet/bundled-embed/README.md": "bundled-embed.md",
    "quintet/bundled-vision/README.md": "bundled-vision.md",
    "quintet/bundled-draft/README.md": "bundled-draft.md",
    "examples/vllm-scripts/README.md": "examples/vllm-scripts.md",
    "examples/vendor-platform/README.md": "examples/vendor-platform.md",
    "examples/model-family/README.md": "examples/model-family.md",
}

_TOKEN = re.compile(r"^```.*?^```|\[(?P<text>(?:`[^`]*`|[^\]`])*)\]\((?P<target>[^)\s]+)\)|`[^`]*`", re.M | re.S)
_HEADING = re.compile(r"^#+ +(.+?) *$", re.M)


def links(markdown: str) -> list[str]:
    """Targets of the links outside code."""
    return [match["target"] for match in _TOKEN.finditer(markdown) if match["target"]]


def anchors(markdown: str) -> set[str]:
    """Anchors of the headings outside code blocks, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```", "", markdown, flags=re.M | re.S)
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in _HEADING.findall(prose)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def pages_of_nav(nav: Any) -> list[str]:
    """Paths of the pages of a nav tree, in order."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [page for entry in entries for page in pages_of_nav(entry)]


def site_path(path: str) -> str | None:
    """Returns the place on the site of a file of the repository; None if it is not there."""
    return path.removeprefix("docs/") if path.startswith("docs/") else OUTSIDE.get(path)


def source_path(page: str) -> str:
    """Returns the file of the repository that a page of the site is made from."""
    return next((path for path, there in OUTSIDE.items() if there == page), f"docs/{page}")


def rewritten(markdown: str, page: str, repository: str | None) -> str:
    """The text of a page of the site, with links that work there."""
    folder = posixpath.dirname(source_path(page))

    def link(match: re.Match[str]) -> str:
        text, target = match["text"], match["target"]
        if target is None or re.match(r"[a-z]+:|#", target):
            return match.group()
        path, mark, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(folder, path))
        if (there := site_path(path)) is not None:
            return f"[{text}]({posixpath.relpath(there, posixpath.dirname(page) or '.')}{mark}{anchor})"
        if repository:
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            return f"[{text}]({repository.rstrip('/')}/{kind}/main/{path}{mark}{anchor})"
        return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"

    return _TOKEN.sub(link, markdown)


# ------------------------------------------------------------------------------------------------ called by MkDocs


def on_config(config: Any) -> Any:
    """Settings of Markdown extensions that plain YAML cannot hold."""
    from pymdownx.slugs import slugify

    config.mdx_configs["toc"] = {"slugify": slugify(case="lower"), "permalink": True}
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages from outside docs/."""
    from mkdocs.structure.files import File

    for path, there in OUTSIDE.items():
        files.append(File.generated(config, there, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    return rewritten(markdown, page.file.src_uri, config.repo_url)

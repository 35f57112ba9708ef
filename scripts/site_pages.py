"""Settings that mkdocs.yml cannot express: pages outside docs/, and links to files that are not pages.

README.md, CONTRIBUTING.md and CHANGELOG.md belong to the site, too. Links in the repository's pages lead from file to
file. Here a link to a page becomes a link between pages, and a link to code becomes the path of the file.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"\[([^]\[]*)]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.config_file_path).parent
    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(root / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files, **_: Any) -> str:
    root = Path(config.config_file_path).parent
    folder = "" if page.file.src_uri in ROOT_PAGES.values() else "docs"

    def lead(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        uri = ROOT_PAGES.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(uri):
            return f"[{text}]({uri}{anchor})"
        if not (root / path).is_file():
            return link[0]  # leads nowhere: mkdocs warns about it
        return text if "`" in text else f"{text} (`{path}`)"

    return LINK.sub(lead, markdown)

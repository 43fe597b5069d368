"""The site: Sphinx, MyST and furo. ``make docs`` builds it into ``site/``, without a network."""

from __future__ import annotations

import inspect
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT / "src"))

project = "ekfac"
author = "The ekfac authors"
copyright = "the ekfac authors, MIT licence"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["requirements.txt"]
html_theme = "furo"
html_title = "ekfac"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
html_math_renderer = "mathml"
pygments_style = "friendly"
pygments_dark_style = "monokai"

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline", "colon_fence"]
# Files of the repository that pages link to are copied into the site, so that no link leads out of it.
myst_url_schemes = {"http": None, "https": None, "mailto": None, "repository": {"url": "_files/{{path}}"}}

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")
_PICTURE = re.compile(r'<picture>\s*<source[^>]*srcset="([^"]+)">\s*<img alt="([^"]*)" src="([^"]+)">\s*</picture>')
_linked: set[str] = set()


def _shown(path: str) -> str:
    """The name of a file's copy: pages of other folders are shown as text."""
    return f"{path}.txt" if path.endswith((".md", ".py", ".jsonl")) else path


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Turn links out of docs/ into links to copies, folders into text, and pictures into their light and dark form."""

    def replace(match: re.Match[str]) -> str:
        _, text, path, _ = match.groups()
        place = ROOT / path
        if not place.exists():
            raise FileNotFoundError(f"{docname}: {path} is not in the repository")
        if place.is_dir():
            return f"{text} (`{path}`)"
        _linked.add(path)
        return f"[{text}](repository:{_shown(path)})"

    def both(match: re.Match[str]) -> str:
        dark, alt, light = match.groups()
        forms = ((light, "only-light"), (dark, "only-dark"))
        return "\n\n".join(f"```{{image}} {file}\n:alt: {alt}\n:class: {form}\n```" for file, form in forms)

    source[0] = _PICTURE.sub(both, _LINK.sub(replace, source[0]))
    if docname == "index" and not (DOCS / "reliability.md").exists():
        source[0] = source[0].replace("\nreliability\n", "\n")


def _copy(app: Sphinx, exception: Exception | None) -> None:
    if exception is None:
        for path in sorted(_linked):
            target = Path(app.outdir) / "_files" / _shown(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, target)


def _mathml(tex: str, block: bool) -> str:
    """MathML of what docutils knows; typewriter letters become plain ones, which it does not."""
    tex = re.sub(r"\\texttt\{([^}]*)\}", lambda match: rf"\text{{{match[1]}}}", tex).replace(r"\_", "_")
    if block and "&" in tex:
        tex = tex.replace("&&", r"\quad")
        tex = rf"\begin{{aligned}}{tex}\end{{aligned}}"
    return str(tex2mathml(tex, as_block=block))


def _inline_math(self: Any, node: nodes.math) -> None:
    self.body.append(_mathml(node.astext(), block=False))
    raise nodes.SkipNode


def _block_math(self: Any, node: nodes.math_block) -> None:
    self.body.append(f'<div class="math">{_mathml(node.astext(), block=True)}</div>')
    raise nodes.SkipNode


def _signature(app: Sphinx, what: str, name: str, found: Any, options: Any, *shown: str | None) -> Any:
    """Show a class's own arguments where autodoc would show those of a ``__new__`` that passes everything on."""
    if what != "class" or shown[0] != "(*args, **kwargs)":
        return None
    arguments = inspect.signature(found).parameters.values()
    named = [one.replace(annotation=one.empty) for one in arguments if one.kind is not one.VAR_KEYWORD]
    return str(inspect.Signature(named)), None


def setup(app: Sphinx) -> None:
    """Mathematics as MathML, which browsers show by themselves; links into the repository."""
    app.connect("autodoc-process-signature", _signature)
    app.add_html_math_renderer("mathml", (_inline_math, None), (_block_math, None))
    app.connect("source-read", _read)
    app.connect("build-finished", _copy)

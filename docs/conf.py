"""The documentation site: `pip install -e '.[docs]' && sphinx-build -W -n docs docs/_build`."""

import os
import sys
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from docutils.nodes import SkipNode
from docutils.utils.math.latex2mathml import tex2mathml

sys.path.insert(0, str(Path(__file__).parent))

import generate  # it lies next to this file

import vitmha

project = "vitmha"
author = "the vitmha authors"
project_copyright = "2026, the vitmha authors"
version = release = vitmha.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]

html_theme = "furo"
html_title = "vitmha"
html_theme_options = {
    "source_repository": "https://github.com/vitmha/vitmha/",
    "source_branch": "main",
    "source_directory": "docs/",
}
smartquotes = False  # they would change "--option"
html_static_path = ["_static"]
html_css_files = ["custom.css"]

# Tutorials are executed at each build, on data that ships with the package; `-D nb_execution_mode=off` builds the site
# without them and without the live page. Their Python and their commands are those of this tree and of this
# environment, also if it is not activated.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(vitmha.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several would wait for each other on a busy machine
os.environ["TTY_COMPATIBLE"] = "0"  # no progress bars and colors of rich
nb_execution_mode = "force"
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_merge_streams = True
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
copybutton_exclude = ".linenos, .gp, .go"

html_math_renderer = "mathml"  # browsers draw it without a script from the network

default_role = "code"  # docstrings write `name` in backquotes
autodoc_default_options = {"members": True}
autodoc_inherit_docstrings = False  # those of Lightning name its own pages
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_admonition_for_examples = False
napoleon_custom_sections = [("Source", "notes_style")]
python_use_unqualified_type_names = True
maximum_signature_line_length = 88

# Names of other projects are links where their inventory can be read, and plain text without network.
INVENTORIES = {
    "python": "https://docs.python.org/3/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "torchvision": "https://docs.pytorch.org/vision/stable/",
    "lightning": "https://lightning.ai/docs/pytorch/stable/",
    "numpy": "https://numpy.org/doc/stable/",
    "pillow": "https://pillow.readthedocs.io/en/stable/",
    "matplotlib": "https://matplotlib.org/stable/",
}
nitpick_ignore_regex = [(r"py:.*", r"(?!vitmha\.).*")]


def _is_reachable(url: str) -> bool:
    try:
        with urlopen(f"{url}objects.inv", timeout=5):
            return True
    except (URLError, TimeoutError, OSError):
        return False


intersphinx_mapping = {name: (url, None) for name, url in INVENTORIES.items() if _is_reachable(url)}


def _write_live_page(app, exception):  # type: ignore[no-untyped-def]
    if exception is None and app.builder.format == "html" and app.config.nb_execution_mode != "off":
        generate.write_live_page(Path(app.srcdir) / "images" / "cifar10", Path(app.outdir) / "live")


def _write_inline_math(self, node):  # type: ignore[no-untyped-def]
    self.body.append(tex2mathml(node.astext()))
    raise SkipNode


def _write_math(self, node):  # type: ignore[no-untyped-def]
    self.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise SkipNode


def setup(app):  # type: ignore[no-untyped-def]  # Sphinx's hook
    """Writes the generated pages before Sphinx looks for sources, and the live page into the finished site."""
    app.connect("config-inited", lambda app, _: generate.write_pages(Path(app.srcdir) / "reference"))
    app.add_html_math_renderer("mathml", (_write_inline_math, None), (_write_math, None))
    app.connect("build-finished", _write_live_page)

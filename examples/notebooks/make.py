"""Write three examples as notebooks, executed: ``python examples/notebooks/make.py``.

A cell is what two blank lines part; the docstring becomes text, and the picture is shown at the end.
"""

from __future__ import annotations

import ast
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

HERE = Path(__file__).resolve().parent
NAMES = ("laplace", "lora", "pinn")


def notebook(name: str) -> nbformat.NotebookNode:
    """Return an example as a notebook that has not run yet."""
    source = (HERE.parent / f"{name}.py").read_text()
    about = ast.get_docstring(ast.parse(source)) or ""
    title, _, rest = about.partition("\n")
    code = source[source.index('"""', 3) + 3 :].strip()
    shown = f'from IPython.display import Image\n\nImage("runs/gallery/{name}.png")'
    cells = [new_markdown_cell(f"# {title}\n{rest}".strip(), id=f"{name}-about")]
    chunks = [*code.split("\n\n\n"), shown]
    cells += [new_code_cell(chunk.strip(), id=f"{name}-{number}") for number, chunk in enumerate(chunks)]
    return new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})


def execute(found: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Run a notebook in an empty folder; an error in a cell is raised."""
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(found, timeout=300, record_timing=False, resources={"metadata": {"path": folder}})
        return client.execute()


if __name__ == "__main__":
    for name in NAMES:
        nbformat.write(execute(notebook(name)), HERE / f"{name}.ipynb")
        print(f"written: {name}.ipynb")

"""The notebooks run from top to bottom, with fewer steps than a reader takes, and leave no file in the repository."""

import re
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.ipynb"))
ENOUGH = "STEPS, PROMPTS = 1, 2"
PYTHON = [sys.executable, str(Path(__file__).with_name("forks.py")), "python"]
FORKS = f"import sys\nsys.executable = '{' '.join(PYTHON)}'"  # what they start is a fork


class Kernel(AsyncKernelManager):
    """A kernel that is a fork."""

    def format_kernel_cmd(self, extra_arguments=None):
        return [*PYTHON, "-m", "ipykernel_launcher", "-f", self.connection_file]


def test_they_run(tmp_path):
    """One after the other in one kernel, which forgets every name between them."""
    notebooks = [nbformat.read(file, as_version=4) for file in NOTEBOOKS]
    cells = [nbformat.v4.new_code_cell(FORKS)]
    assert len(notebooks) == 2
    for notebook in notebooks:
        (settings,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
        settings.source = re.sub(r"^STEPS, PROMPTS = \d+, \d+", ENOUGH, settings.source)
        assert settings.source.startswith(ENOUGH)
        cells += [*notebook.cells, nbformat.v4.new_code_cell("%reset -f")]
    for number, cell in enumerate(cells):
        cell["id"] = str(number)
    both = nbformat.v4.new_notebook(cells=cells, metadata=notebooks[0].metadata)
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(both, timeout=280, kernel_manager_class=Kernel, resources=where).execute()
    for notebook in notebooks:
        shown = [kind for cell in notebook.cells for out in cell.get("outputs", ()) for kind in out.get("data", ())]
        assert shown.count("image/svg+xml") == 1  # the curve
        assert shown.count("image/png") == 2  # before and after, and stock diffusers
    folders = list((tmp_path / "runs").iterdir())
    assert len(folders) == len(notebooks)
    for folder in folders:
        assert (folder / "lora").is_dir()
        assert (folder / "report.html").is_file()


@pytest.mark.parametrize("file", NOTEBOOKS, ids=[file.stem for file in NOTEBOOKS])
def test_it_stays_small_and_names_no_place_of_the_machine_that_ran_it(file):
    assert file.stat().st_size < 300_000
    notebook = nbformat.read(file, as_version=4)
    texts = [str(out) for cell in notebook.cells for out in cell.get("outputs", ())]
    assert [
        text for text in texts if any(place in text for place in (tempfile.gettempdir(), str(Path.home()), "Traceback"))
    ] == []

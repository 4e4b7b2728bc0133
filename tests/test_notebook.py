"""The notebook runs from top to bottom in a kernel of its own, shorter than it stands, and shows what it made."""

import os

import nbformat
from nbclient import NotebookClient
from processes import ROOT

NOTEBOOK = ROOT / "notebooks/first_team.ipynb"


def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # in place of the folder above it
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    made = [[output.output_type for output in cell.outputs] for cell in notebook.cells if cell.cell_type == "code"]
    for cell in notebook.cells:
        cell.source = cell.source.replace("max_episodes=1024", "max_episodes=16, rollout_buffer_size=16")
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path}}).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell, types in zip(cells, made, strict=True):  # what is kept in the file is of each kind that a run shows
        shown = [output.output_type for output in cell.outputs if output.get("name") != "stderr"]
        assert set(shown) == set(types), cell.source
    assert sorted(path.name.split("__")[0] for path in (tmp_path / "runs").iterdir()) == ["by_four", "ippo_llm"]
    assert "agent 1: " in cells[3].outputs[0].text and os.listdir(tmp_path).count("by_four.py") == 1

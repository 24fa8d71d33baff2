"""Jupyter: notebooks that train on the device, one of them written for CUDA, run without a browser by nbclient."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat
import torch
from trial import Program, Results, falls, main

CELLS = (
    """
import json
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 1).to(DEVICE)
x = torch.randn(64, 4).to(DEVICE)
y = x.sum(1, keepdim=True)
""",
    """
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
losses = []
for step in range(30):
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
""",
    "x[:2]",
    "print(json.dumps(losses))",
)


# The application `jupyter execute`.
EXECUTE = """
from nbclient.cli import NbClientApp

NbClientApp.launch_instance()
"""


def book_for(device: str) -> nbformat.NotebookNode:
    cells = [nbformat.v4.new_code_cell(text) for text in (f"DEVICE = {device!r}", *CELLS)]
    return nbformat.v4.new_notebook(cells=cells)


def notebook(device: torch.device) -> Results:
    book = book_for(str(device))
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3").execute()
    shown = book.cells[3].outputs[0]["data"]["text/plain"]
    assert ("device='bp" in shown) == (device.type == "bp"), shown
    return {"losses": falls(json.loads(book.cells[4].outputs[0]["text"]))}


def notebook_for_cuda(device: torch.device) -> Results:
    """Runs `backplane run --as-cuda jupyter-execute`. The kernel is a child process. On the CPU: the same notebook."""
    if device.type == "cpu":
        return notebook(device)
    with tempfile.TemporaryDirectory() as folder:
        program, path = Path(folder, "jupyter-execute"), Path(folder, "cuda.ipynb")
        program.write_text(EXECUTE, encoding="utf-8")
        book = book_for("cuda")
        book.cells[0].source += "\nimport torch\nassert torch.cuda.is_available()"
        nbformat.write(book, path)
        command = [sys.executable, "-m", "torch_backplane", "run", "--as-cuda", str(program), "--inplace", str(path)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr[-2000:]
        book = nbformat.read(path, as_version=4)
    assert "device='bp" in book.cells[3].outputs[0]["data"]["text/plain"]
    return {"losses": falls(json.loads(book.cells[4].outputs[0]["text"]))}


main(
    "nbclient",
    [
        Program("a notebook without a browser", notebook, runs=1),
        Program("a notebook for CUDA, with run --as-cuda", notebook_for_cuda, runs=1),
    ],
)

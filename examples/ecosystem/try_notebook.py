"""Jupyter: a notebook that trains on the device, run without a browser by nbclient."""

import json

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


def notebook(device: torch.device) -> Results:
    cells = [nbformat.v4.new_code_cell(text) for text in (f"DEVICE = {str(device)!r}", *CELLS)]
    book = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3").execute()
    shown = book.cells[3].outputs[0]["data"]["text/plain"]
    assert ("device='bp" in shown) == (device.type == "bp"), shown
    return {"losses": falls(json.loads(book.cells[4].outputs[0]["text"]))}


main("nbclient", [Program("a notebook without a browser", notebook, runs=1)])

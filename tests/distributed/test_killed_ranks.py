"""Tests that training survives killed ranks: a clear error in the others, and equal losses after a restart.

KILLS=50 kills a rank 50 times; the default is twice.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import ranks
from test_collectives import DEVICES

TIMEOUT = 20  # seconds, of the process group

TRAIN = """
import datetime
import json
import signal

start(timeout=datetime.timedelta(seconds=TIMEOUT))
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(
    torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to("bp"))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
losses = []
if os.path.exists(CHECKPOINT):
    state = torch.load(CHECKPOINT, map_location="bp")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    losses = state["losses"]
try:
    for step in range(len(losses), 8):
        if (rank, step) == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(step * size + rank)
        x = torch.randn(16, 4, generator=generator).to("bp")
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        losses.append(mean.item())
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
            torch.save(state, CHECKPOINT + ".new")
            os.replace(CHECKPOINT + ".new", CHECKPOINT)
        dist.barrier()
except RuntimeError as error:
    print("error:", str(error).splitlines()[0], flush=True)
    os._exit(7)
print(json.dumps(losses))
dist.destroy_process_group()
"""


def train(checkpoint: Path, victim: tuple[int, int] | None) -> list[tuple[int, str]]:
    """Starts two ranks; returns the exit code and the last line of each."""
    code = f"TIMEOUT, CHECKPOINT, VICTIM = {TIMEOUT}, {str(checkpoint)!r}, {victim!r}\n{TRAIN}"
    with ranks.started(code, 2, **DEVICES["host"]) as processes:
        begin = time.monotonic()
        outputs = [process.communicate(timeout=120)[0] for process in processes]
        assert victim is None or time.monotonic() - begin < 60 + TIMEOUT
        return [(p.returncode, (out.splitlines() or [""])[-1]) for p, out in zip(processes, outputs, strict=True)]


@pytest.mark.timeout(3600)
@pytest.mark.slow
def test_killed_ranks(tmp_path: Path) -> None:
    (_, expected), (_, same) = train(tmp_path / "whole.pt", None)
    assert expected == same
    assert len(json.loads(expected)) == 8
    draw = random.Random(0)
    for number in range(int(os.environ.get("KILLS", "2"))):
        checkpoint = tmp_path / f"{number}.pt"
        victim = draw.randrange(2), draw.randrange(8)
        ended = train(checkpoint, victim)
        assert ended[victim[0]][0] == -signal.SIGKILL
        code, line = ended[1 - victim[0]]
        assert code == 7, line
        assert f"rank {1 - victim[0]} of 2" in line, line
        assert any(name in line for name in ("all_reduce", "broadcast", "barrier", "all_gather")), line
        assert [line for _, line in train(checkpoint, None)] == [expected, expected]

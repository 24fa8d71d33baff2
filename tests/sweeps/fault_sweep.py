"""Makes each device call of a training step fail in turn, and repeats the step.

    python tests/sweeps/fault_sweep.py --driver opencl

After each fault: the error must be the injected one, all memory must be freed, and the next step must give the results
of a step without faults. Prints the number of calls, the number of faults that the program did not notice (for example
because an allocation is retried), and what went wrong. The exit status is 1 if something did.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections import Counter


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--driver", default="host")
    parser.add_argument("--kind", choices=["error", "out of memory"], default="error")
    parser.add_argument("--json", action="store_true")
    settings = parser.parse_args()
    os.environ["TORCH_BACKPLANE_DRIVERS"] = settings.driver

    import torch
    from torch import nn

    from torch_backplane.testing import faults

    faults.prepare()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(1352, 5),
    ).to("bp")  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = torch.randn(64, 1, 28, 28).pin_memory(), torch.randint(0, 5, (64,))
    side = torch.bp.Stream()

    def step() -> float:
        torch.manual_seed(1)
        optimizer.zero_grad()
        with side:
            x = images.to("bp", non_blocking=True)
        torch.bp.current_stream().wait_stream(side)
        x.record_stream(torch.bp.current_stream())
        loss = nn.functional.cross_entropy(model(x), labels.to("bp"))
        loss.backward()
        optimizer.step()
        return loss.item()

    step()  # one-time allocations
    start = {name: one.clone() for name, one in model.state_dict().items()}
    momenta = [optimizer.state[one]["momentum_buffer"].clone() for one in model.parameters()]

    def reset() -> None:
        model.load_state_dict(start)
        for parameter, momentum in zip(model.parameters(), momenta, strict=True):
            optimizer.state[parameter]["momentum_buffer"].copy_(momentum)
        optimizer.zero_grad()
        gc.collect()
        torch.bp.synchronize()
        torch.bp.empty_cache()  # so steps allocate from the device, which can fail, too

    def state() -> list[torch.Tensor]:
        return [one.cpu() for one in model.state_dict().values()]

    gc.collect()
    gc.freeze()  # PyTorch's objects, so collections after steps are fast
    for _ in range(2):
        reset()
        expected_loss = step()
        expected = state()
    reset()
    used = torch.bp.memory_allocated()
    faults.counts(reset=True)
    step()
    calls = Counter(faults.counts(reset=True))
    if settings.kind == "out of memory":
        calls = Counter({name: count for name, count in calls.items() if name in ("allocate", "map")})
    raised, unnoticed, wrong = Counter[str](), Counter[str](), []
    for name, count in sorted(calls.items()):
        for nth in range(1, count + 1):
            title = f"{name} {nth} of {count}"
            reset()
            try:
                with faults.fails(name, nth, settings.kind):
                    step()
                    torch.bp.synchronize()
                unnoticed[name] += 1
            except torch.OutOfMemoryError as error:
                raised[name] += 1
                if settings.kind != "out of memory":
                    wrong.append(f"{title}: {error}")
            except RuntimeError as error:
                raised[name] += 1
                if settings.kind != "error" or f"injected fault in {name}" not in str(error):
                    wrong.append(f"{title}: {error}")
            reset()
            left = torch.bp.memory_allocated() - used
            if left:
                wrong.append(f"{title}: {left} bytes are still allocated")
            loss = step()
            far = max(
                (one.double() - other.double()).abs().max().item() for one, other in zip(state(), expected, strict=True)
            )
            if abs(loss - expected_loss) > 1e-5 or far > 1e-5:
                wrong.append(f"{title}: the next step has loss {loss}, not {expected_loss}; weights differ by {far}")
    report = {
        "device": torch.bp.get_device_name(),
        "calls": dict(calls),
        "raised": dict(raised),
        "unnoticed": dict(unnoticed),
        "wrong": wrong,
    }
    if settings.json:
        print(json.dumps(report))
    else:
        print(f"{report['device']}: {calls.total()} calls of a step, each failed once ({settings.kind})")
        for name, count in sorted(calls.items()):
            print(f"  {name}: {count}, raised {raised[name]}, unnoticed {unnoticed[name]}")
        print(*(f"WRONG {line}" for line in wrong), sep="\n")
        print(f"{calls.total() - len(wrong)} passed, {len(wrong)} wrong")
    return 1 if wrong or not calls else 0


if __name__ == "__main__":
    sys.exit(main())

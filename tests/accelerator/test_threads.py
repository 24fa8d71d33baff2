"""Several threads on several devices: thread-local state, no deadlocks, and no mixed-up results."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from torch_backplane import _C


def in_threads(count: int, work: Callable[[int], object]) -> list[object]:
    """Runs work(0), work(1), … in separate threads, started together; raises the first failure."""
    start = threading.Barrier(count)

    def run(number: int) -> object:
        start.wait(timeout=30)
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return [future.result(timeout=120) for future in [pool.submit(run, number) for number in range(count)]]


def test_the_current_device_is_thread_local() -> None:
    both_set = threading.Barrier(2)

    def work(number: int) -> tuple[int, torch.device]:
        assert torch.accelerator.current_device_index() == 0  # a new thread starts with device 0
        torch.accelerator.set_device_index(number + 1)
        both_set.wait(timeout=30)
        return torch.accelerator.current_device_index(), torch.ones(1, device="bp").device

    assert in_threads(2, work) == [(1, torch.device("bp:1")), (2, torch.device("bp:2"))]
    assert torch.accelerator.current_device_index() == 0


def test_the_current_stream_is_thread_local() -> None:
    default = torch.accelerator.current_stream()

    def work(number: int) -> torch.Stream:
        assert torch.accelerator.current_stream() == default
        stream = torch.Stream("bp:0")
        torch.accelerator.set_stream(stream)
        return torch.accelerator.current_stream()

    first, second = in_threads(2, work)
    assert first != second
    assert torch.accelerator.current_stream() == default


def test_two_threads_on_two_devices_train() -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(16, 8), torch.randn(16, 2)
    state = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).state_dict()

    def work(number: int) -> dict[str, torch.Tensor]:
        device = torch.device("bp", number)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).to(device)
        model.load_state_dict(state)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        x, y = inputs.to(device), targets.to(device)
        for _ in range(30):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            assert loss.item() > 0
        assert all(parameter.device == device for parameter in model.parameters())
        return {name: value.cpu() for name, value in model.state_dict().items()}

    first, second = in_threads(2, work)
    torch.testing.assert_close(first, second)


def test_many_threads_allocate_compute_and_free() -> None:
    before = [torch.accelerator.memory_allocated(index) for index in range(4)]

    def work(number: int) -> int:
        generator = torch.Generator().manual_seed(number)
        device = torch.device("bp", number % 4)
        kept: list[torch.Tensor] = []
        for _ in range(150):
            size = int(torch.randint(1, 5000, (), generator=generator))
            x = torch.full((size,), float(number), device=device)
            kept.append(x + 1)
            if len(kept) > 10:
                assert torch.equal(kept.pop(0)[:1].cpu(), torch.tensor([number + 1.0]))
            assert (x.view(-1).sum() / size).item() == pytest.approx(number)
        return len(kept)

    assert in_threads(8, work) == [10] * 8
    assert [torch.accelerator.memory_allocated(index) for index in range(4)] == before


def test_threads_that_share_a_device_and_a_tensor() -> None:
    shared = torch.arange(1000.0, device="bp")

    def work(number: int) -> float:
        return sum(float((shared * number).sum()) for _ in range(50))

    assert in_threads(4, work) == [50 * 499500.0 * number for number in range(4)]


def test_data_dependent_sizes_in_a_thread_pool() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(100, 3, generator=generator) for _ in range(400)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: (x.to("bp") > 0).nonzero().cpu(), inputs))
    assert sum(not torch.equal(indices, (x > 0).nonzero()) for indices, x in zip(found, inputs, strict=True)) == 0


def work_with_sizes_of_values(generator: torch.Generator, device: str) -> list[torch.Tensor]:
    results = []
    for _ in range(30):
        x = torch.randn(50, 7, generator=generator).to(device)
        results += [(x > 0).nonzero(), x[x > 1], (x * 3).long().unique(), x.masked_select(x < 0)]
    return [one.cpu() for one in results]


def train_a_small_model(generator: torch.Generator, device: str) -> list[torch.Tensor]:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1, generator=generator)
    model.to(device)
    results = []
    for _ in range(15):
        x = torch.randn(8, 1, 8, 8, generator=generator).to(device)
        y = torch.randint(0, 5, (8,), generator=generator).to(device)
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        results += [loss.detach().cpu(), *(parameter.grad.cpu() for parameter in model.parameters())]
    return results


@pytest.mark.parametrize("work", [work_with_sizes_of_values, train_a_small_model])
def test_four_threads_on_one_stream(work: Callable[[torch.Generator, str], list[torch.Tensor]]) -> None:
    expected = [work(torch.Generator().manual_seed(number), "cpu") for number in range(4)]
    found = in_threads(4, lambda number: work(torch.Generator().manual_seed(number), "bp"))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_streams_of_two_threads_do_not_wait_for_each_other() -> None:
    """Waiting for a busy stream does not hold the GIL, and does not block another thread's stream."""
    asleep = threading.Event()
    finished: list[str] = []

    def slow() -> None:
        with torch.Stream("bp:0"):
            _C.sleep(500)  # longer than the other thread's one operator takes on a loaded machine
            asleep.set()
            torch.accelerator.current_stream().synchronize()
        finished.append("slow")

    def quick() -> None:
        assert asleep.wait(timeout=30)
        with torch.Stream("bp:0"):
            assert (torch.ones(10, device="bp") + 1).sum().item() == 20
        finished.append("quick")

    threads = [threading.Thread(target=slow), threading.Thread(target=quick)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert finished == ["quick", "slow"]


def test_concurrent_copies_between_devices_in_both_directions() -> None:
    def work(number: int) -> bool:
        source, destination = f"bp:{number}", f"bp:{1 - number}"
        x = torch.full((5000,), float(number + 1), device=source)
        return all(bool((x.to(destination) == number + 1).all()) for _ in range(100))

    assert in_threads(2, work) == [True, True]


def test_backward_in_two_threads_through_two_devices() -> None:
    def work(number: int) -> list[float]:
        x = torch.ones(4, device="bp:0", requires_grad=True)
        for _ in range(30):
            ((x * 2).to("bp:1") * number).to("bp:0").sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    assert in_threads(3, work) == [[60.0 * number] * 4 for number in range(3)]


def test_threads_that_share_a_generator_draw_different_numbers() -> None:
    generator = torch.Generator("bp").manual_seed(0)

    def work(number: int) -> list[tuple[float, ...]]:
        return [tuple(torch.rand(4, device="bp", generator=generator).tolist()) for _ in range(100)]

    drawn = [numbers for part in in_threads(4, work) for numbers in part]  # type: ignore[attr-defined]
    assert len(set(drawn)) == 400


def test_concurrent_first_use(run_python: Callable[..., object]) -> None:
    result = run_python(
        "import threading, torch\n"
        "results = []\n"
        "def work(): results.append(torch.ones(3, device='bp').sum().item())\n"
        "threads = [threading.Thread(target=work) for _ in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "print(results)"
    )
    assert result.stdout.strip() == str([3.0] * 8), result.stderr  # type: ignore[attr-defined]


def test_python_hooks_in_backward_threads() -> None:
    x = torch.ones(3, device="bp:1", requires_grad=True)
    names: list[str] = []
    x.register_hook(lambda grad: names.append(threading.current_thread().name) or (grad + 1).to("bp:2").to("bp:1"))
    for _ in range(20):
        (x * 2).sum().backward()
    assert len(names) == 20
    assert x.grad.tolist() == [60.0] * 3


def test_profiles_end_while_other_threads_compute() -> None:
    done = threading.Event()

    def work(number: int) -> int:
        if number == 0:
            try:
                counts = []
                for _ in range(20):
                    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profile:
                        torch.ones(8, device="bp").mul_(2)
                    counts.append(sum(event.name == "aten::mul_" for event in profile.events()))
                return min(counts)
            finally:
                done.set()
        x, calls = torch.ones(8, 8, device=torch.device("bp", number - 1)), 0
        while not done.is_set():
            x = (x @ x) / 8
            calls += 1
        assert x.sum().item() == 64
        return calls

    assert all(in_threads(3, work))

"""Selection among an operator's candidates without tuning: by cost and by workspace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from agreement import DEVICE, peak_memory
from targets import target
from test_library_products import need_library

from torch_backplane import plans, preferences
from torch_backplane.planning import Candidate, Candidates, costs, host_sees_memory
from torch_backplane.tuning import choosing

backends: Any = torch.backends.bp  # type: ignore[attr-defined]


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Restores the preferences. A decorator, because fixtures do not run in the worker process of the tests."""
    before = preferences.without_room()
    preferences._without_room.clear()
    try:
        yield
    finally:
        preferences.set_workspace(preferences.NO_LIMIT)
        for family in preferences.LIBRARIES:
            preferences.prefer(family, preferences.DEFAULT)
        preferences._without_room.clear()
        preferences._without_room.update(before)


as_it_was = _as_it_was()  # decorates tests


def takes_all(*described: Any) -> None:
    return None


@as_it_was
def test_the_cheapest_candidate_runs() -> None:
    family = Candidates(
        "products",
        Candidate("host", takes_all, cost=lambda x: 50 if x.numel() >= 34 else 200),
        Candidate("driver", takes_all, cost=lambda x: 300),
        Candidate("generated", takes_all),
    )
    for size, cheapest in ((5, "generated"), (50, "host"), (33, "generated"), (34, "host"), (5, "generated")):
        assert family.choose(torch.empty(size, device=DEVICE)) == cheapest
    with preferences.preferring("products", "driver"):
        assert family.choose(torch.empty(5, device=DEVICE)) == "driver"


@as_it_was
def test_library_without_a_cost_is_preferred_except_on_processors() -> None:
    x = torch.empty(5, device=DEVICE)
    for cost in (None, lambda x: None):
        family = Candidates(
            "transforms",
            Candidate("host", lambda x: "does not"),
            Candidate("driver", takes_all, cost=cost),
            Candidate("generated", takes_all),
        )
        for kind, chosen in (("gpu", "driver"), ("cpu", "generated")):
            with target(kind):
                assert family.choose(x) == chosen
                with preferences.preferring("transforms", "generated"):
                    assert family.choose(x) == "generated"
    stated = Candidates(
        "transforms",
        Candidate("host", lambda x: "does not"),
        Candidate("driver", takes_all, cost=lambda x: costs.GENERATED - 1),
        Candidate("generated", takes_all),
    )
    with target("cpu"):
        assert stated.choose(x) == "driver"


@as_it_was
def test_candidate_without_enough_workspace_is_skipped() -> None:
    family = Candidates(
        "attention",
        Candidate("host", takes_all, cost=lambda x: 0, workspace=lambda form, x: 10 * x.numel()),
        Candidate("driver", lambda x: "does not"),
        Candidate(
            "generated",
            takes_all,
            forms=lambda x: ["wide", "narrow"],
            cost=lambda x: 200,
            workspace=lambda form, x: {"": 2, "wide": 8, "narrow": 4}[form] * x.numel(),
        ),
    )
    x = torch.empty(10, device=DEVICE)
    assert family.choose(x) == "host"
    for limit, found in ((100, "host"), (99, "generated"), (100, "host"), (0, "generated")):
        preferences.set_workspace(limit)
        assert family.choose(x) == found
    with preferences.preferring("attention", "host"):
        assert family.choose(x) == "generated"  # a preference does not extend the workspace
    for limit, found in ((80, "wide"), (79, ""), (preferences.NO_LIMIT, "wide")):
        preferences.set_workspace(limit)
        with choosing.forcing("attention", "generated/wide"):
            assert family.choose(x) == f"generated{'/' if found else ''}{found}"
    # Forms of the last candidate can be skipped. The candidate itself always runs, because none is left after it.
    assert backends.without_workspace() == {
        "attention: host": 5,
        "attention: generated": 2,
        "attention: generated/wide": 1,
    }


def _taken(function: Callable[..., torch.Tensor], *given: torch.Tensor) -> int:
    """Returns the bytes allocated in addition to operands and result."""
    return peak_memory(function, *given) - function(*given).nbytes


def _of_image(image: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    settings = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False])
    grad = image[:, :1].expand(-1, weight.shape[0], -1, -1).contiguous()
    return torch.ops.aten.convolution_backward(grad, image, weight, *settings)[0]


def _by_patches(image: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.conv2d(image, weight, padding=1)


@as_it_was
def test_patches_are_made_for_as_many_images_as_fit_the_workspace() -> None:
    image, weight = torch.randn(6, 4, 20, 20), torch.randn(8, 4, 3, 3)
    given = image.to(DEVICE), weight.to(DEVICE)
    of_one = 4 * 9 * 400 * 4
    with target("cpu"), preferences.preferring("convolutions", "generated"):
        for function in (_by_patches, _of_image):
            expected, free = function(image, weight), _taken(function, *given)
            assert free >= 6 * of_one
            for limit in (3 * of_one, of_one, 7 * of_one):
                preferences.set_workspace(limit)
                torch.testing.assert_close(function(*given).cpu(), expected, atol=1e-4, rtol=1e-4)
                found = _taken(function, *given)
                images = min(6, limit // of_one)
                assert abs(free - found - (6 - images) * of_one) <= 1024, (limit, free, found)  # blocks are rounded
            preferences.set_workspace(of_one - 1)  # runs on the host, or else with one image's patches
            torch.testing.assert_close(function(*given).cpu(), expected, atol=1e-4, rtol=1e-4)
            images = 0 if host_sees_memory(given[0].device) else 1
            found = _taken(function, *given)
            assert abs(free - found - (6 - images) * of_one) <= 1024, found
            preferences.set_workspace(preferences.NO_LIMIT)


@as_it_was
def test_winograd_is_skipped_if_its_tiles_exceed_the_workspace() -> None:
    image, weight = torch.randn(3, 4, 9, 10), torch.randn(8, 4, 3, 3)
    given = image.to(DEVICE), weight.to(DEVICE)
    of_weights, of_one = 16 * 8 * 4 * 4, 16 * (8 + 4) * 25 * 4
    expected = _by_patches(image, weight)
    with choosing.forcing("convolutions", "generated/winograd"):
        enough = of_weights + of_one
        for limit, parts in ((preferences.NO_LIMIT, 1), (enough + of_one, 2), (enough, 3), (enough - 1, 0)):
            preferences.set_workspace(limit)
            for _ in range(2):
                torch.testing.assert_close(_by_patches(*given).cpu(), expected, atol=1e-4, rtol=1e-4)
            plan_text = plans.explain(_by_patches, *given)
            assert plan_text.count("launch bp_winograd_image") == parts, (limit, plan_text)
    of_libraries = {"convolutions: driver", "products: driver"}
    assert set(backends.without_workspace()) - of_libraries == {"convolutions: generated/winograd"}


@as_it_was
def test_driver_library_is_skipped_if_copies_exceed_the_workspace() -> None:
    need_library()
    a, b = torch.randn(5, 12), torch.randn(6, 4)
    backends.preferred_blas_library("driver")
    for limit, gaps in ((0, 1), (5 * 6 * 4, 2), (5 * 6 * 4 - 1, 2), (preferences.NO_LIMIT, 2)):
        preferences.set_workspace(limit)
        given = a.to(DEVICE)[:, : 6 * gaps : gaps], b.to(DEVICE)
        torch.testing.assert_close(torch.mm(*given).cpu(), a[:, : 6 * gaps : gaps] @ b, atol=1e-4, rtol=1e-4)
        called = "call CLBlast matmul" in plans.explain(torch.mm, *given)
        assert called == (limit != 5 * 6 * 4 - 1), limit
    assert set(backends.without_workspace()) == {"products: driver"}

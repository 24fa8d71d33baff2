"""What the audit says of all results: in few words, and as the page docs/audit.md."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_backplane.audit import model
from torch_backplane.audit.bounds import CHAIN, FAMILIES, Finding, beyond
from torch_backplane.kernels.modelled import Modelled

Result = Mapping[str, Any]


def summary(results: Sequence[Result], targets: Sequence[str], nbytes: int) -> dict[str, Any]:
    """`ok`, what is wrong, and what is beyond its bounds: unknown and known."""
    wrong = [f"{one['case']} ({one['target']}): {one['wrong']}" for one in results if one["wrong"]]
    found = [finding for one in results for finding in beyond(one)]
    return {
        "ok": not wrong and all(one.reason for one in found),
        "bytes": nbytes,
        "targets": list(targets),
        "cases": len({one["case"] for one in results}),
        "wrong": wrong,
        "unknown": [_line(one) for one in found if not one.reason],
        "known": [_line(one) for one in found if one.reason],
    }


def _line(one: Finding) -> str:
    reason = f": {one.reason}" if one.reason else ""
    return f"{one.case} ({one.target}): {one.measure} {_number(one.value)} beyond {_number(one.bound)}{reason}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


# What docs/audit.md begins with.
_INTRODUCTION = Path(__file__).with_name("page.md")


def page(results: Sequence[Result], modelled: Sequence[Modelled], nbytes: int) -> str:
    """docs/audit.md."""
    measured = [one for one in results if one["figures"] is not None]
    took = sum(one.get("took", 0.0) for one in results)
    smaller = sorted({(one["family"], 4 * one["elements"]) for one in measured if 4 * one["elements"] < nbytes})
    less = ", ".join(f"{family} {size >> 20} MiB" for family, size in smaller)
    parts = [
        _INTRODUCTION.read_text(encoding="utf-8").format(
            minutes=f"all targets, {took / 60:.0f} minutes on 2 cores",
            between=model.SAMPLED_GROUPS - 2,
            size=f"{nbytes >> 20} MiB",
            smaller=f"Smaller, so that it does not take too long: {less}" if less else "None is smaller",
            small=model.SMALL_LAUNCH,
            sector=model.SECTOR_BYTES,
            cache=model.FIRST_CACHE_BYTES >> 10,
            banks=model.LOCAL_BANKS,
            launch=model.LAUNCH_SECONDS * 1e6,
            slow=model.GLOBAL_SECONDS * 1e9,
            fast=model.LOCAL_SECONDS * 1e9,
        ),
        *_bounds(),
        *_by_family(measured, modelled),
        *_findings(results),
        *_candidates(measured, modelled),
        *_all([one for one in measured if one["family"] != "candidates"]),
    ]
    return "\n".join(parts) + "\n"


def _bounds() -> Iterable[str]:
    yield "## Bounds\n"
    yield f"No operator fills less than the device, and none has a chain longer than {CHAIN:.0f}·√n of n elements."
    yield "Traffic at most:\n"
    yield "| family | traffic |"
    yield "|---|---|"
    for name, family in FAMILIES.items():
        yield f"| {name} | {'not bounded' if family.traffic is None else family.traffic} |"
    yield ""


def _by_family(results: Sequence[Result], modelled: Sequence[Modelled]) -> Iterable[str]:
    yield "## By family and target\n"
    yield "Of the cases of a family: the median and the worst traffic, the longest chain by its bound, the least"
    yield "fill, and the median and the worst of the modelled time by the ideal.\n"
    yield "| family | target | cases | traffic | chain | fill | time |"
    yield "|---|---|---|---|---|---|---|"
    for family in FAMILIES:
        for one in modelled:
            mine = [each for each in results if each["family"] == family and each["target"] == one.name]
            if not mine:
                continue
            traffic = [each["figures"]["traffic"] for each in mine]
            chain = max(each["figures"]["chain"] / (CHAIN * math.sqrt(each["elements"])) for each in mine)
            least = min(each["figures"]["fill"] for each in mine)
            times = [each["figures"]["seconds"] / each["figures"]["ideal_seconds"] for each in mine]
            yield (
                f"| {family} | {one.name.partition(' (')[0]} | {len(mine)} | {statistics.median(traffic):.2f}, "
                f"{max(traffic):.2f} | {chain:.2f} | {least:.2f} | {statistics.median(times):.2f}, {max(times):.2f} |"
            )
    yield ""


def _findings(results: Sequence[Result]) -> Iterable[str]:
    yield "## What is beyond its bounds\n"
    wrong = {(one["case"], one["wrong"]) for one in results if one["wrong"]}
    if wrong:
        yield "What is wrong:\n"
        yield from (f"- {case}: {what}" for case, what in sorted(wrong))
        yield ""
    by_case: dict[tuple[str, str], list[Finding]] = {}
    for one in results:
        for finding in beyond(one):
            by_case.setdefault((finding.measure, finding.case), []).append(finding)
    if not by_case:
        yield "Nothing.\n"
        return
    yield "| measure | case | worst | bound | targets | reason |"
    yield "|---|---|---|---|---|---|"
    for (measure, case), found in sorted(by_case.items()):
        worst = (min if measure == "fill" else max)(found, key=lambda one: one.value)
        yield (
            f"| {measure} | {case} | {_number(worst.value)} | {_number(worst.bound)} | {len(found)} | "
            f"{worst.reason or 'not known'} |"
        )
    yield ""


def _candidates(results: Sequence[Result], modelled: Sequence[Modelled]) -> Iterable[str]:
    """Modelled times of what the same product or convolution is computed by."""
    found: dict[str, dict[str, dict[str, float]]] = {}  # by call, form and target
    for one in results:
        if one["family"] == "candidates":
            call, _, form = one["case"].partition(": ")
            of_form = found.setdefault(call, {}).setdefault(form, {})
            of_form[one["target"]] = one["figures"]["seconds"] * 1e3
    if not found:
        return
    yield "## Candidates\n"
    yield "Modelled milliseconds of products and convolutions, by what is chosen untuned (usual) and by other forms:"
    yield "tiles of results of a group, sums that are not divided (whole), Winograd's way. What takes 3 % less than the"
    yield "usual one is bold. The model has no arithmetic: it tells what moves too much or waits too long, not which of"
    yield "two is better beyond that.\n"
    names = [one.name for one in modelled]
    yield f"| call | form | {' | '.join(one.partition(' (')[0] for one in names)} |"
    yield f"|---|---|{'---|' * len(names)}"
    for call, forms in found.items():
        for form, times in forms.items():
            cells = []
            for name in names:
                time, usual = times.get(name), forms.get("usual", {}).get(name)
                text = "–" if time is None else f"{time:.3f}"
                less = time is not None and usual is not None and time < 0.97 * usual
                cells.append(f"**{text}**" if less else text)
            yield f"| {call} | {form} | {' | '.join(cells)} |"
    yield ""


def _all(results: Sequence[Result]) -> Iterable[str]:
    yield "## All cases\n"
    yield "The worst of all targets in each column; the groups of the target that has the fewest.\n"
    by_case: dict[str, list[Result]] = {}
    for one in results:
        by_case.setdefault(one["case"], []).append(one)
    for family in FAMILIES:
        mine = {case: found for case, found in by_case.items() if found[0]["family"] == family}
        if not mine:
            continue
        yield f"### {family.capitalize()}\n"
        plain = [case for case, found in mine.items() if all(_is_plain(one["figures"]) for one in found)]
        rest = [case for case in mine if case not in plain]
        if rest:
            yield "| case | launches | groups | fill | chain | traffic | sectors | local | barriers | banks | time |"
            yield "|---|---|---|---|---|---|---|---|---|---|---|"
        for case in rest:
            yield _row(case, [one["figures"] for one in mine[case]])
        if plain:
            if rest:
                yield ""
            yield (
                f"In one launch that fills the device, coalesced, with no more traffic than the least, and with "
                f"chains of 8 or fewer, {len(plain)}: {', '.join(f'`{one}`' for one in plain)}."
            )
        yield ""


def _is_plain(figures: Mapping[str, Any]) -> bool:
    return (
        figures["launches"] == 1
        and figures["fill"] >= 1
        and figures["chain"] <= 8
        and figures["barriers"] == 0
        and figures["traffic"] < 1.02
        and figures["coalescing"] < 1.02
    )


def _row(case: str, figures: Sequence[Mapping[str, Any]]) -> str:
    def worst(name: str) -> Any:
        return max(one[name] for one in figures)

    fewest = min(figures, key=lambda one: one["groups"])
    group = fewest["items"] // fewest["groups"] if fewest["groups"] else 0
    groups = f"{fewest['groups']:,} × {group}" if group else "–"
    time = max(one["seconds"] / one["ideal_seconds"] for one in figures)
    fill = min(one["fill"] for one in figures)
    return (
        f"| {case} | {worst('launches')} | {groups} | {_number(fill)} | {worst('chain'):,} | {worst('traffic'):.2f} | "
        f"{worst('coalescing'):.2f} | {worst('local_bytes'):,} | {worst('barriers'):,} | {worst('conflicts'):.2f} | "
        f"{time:.2f} |"
    )

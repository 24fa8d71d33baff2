"""The audit's summary, and its report in Markdown (docs/audit.md)."""

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
    """Return the summary: `ok`, wrong results, and exceeded bounds, unknown and known ones."""
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
    return f"{one.case} ({one.target}): {one.measure} {_number(one.value)}, bound {_number(one.bound)}{reason}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


# The introduction of docs/audit.md.
_INTRODUCTION = Path(__file__).with_name("page.md")


def page(results: Sequence[Result], modelled: Sequence[Modelled], nbytes: int) -> str:
    """Return the report in Markdown (docs/audit.md)."""
    measured = [one for one in results if one["figures"] is not None]
    took = sum(one.get("took", 0.0) for one in results)
    smaller = sorted({(one["family"], 4 * one["elements"]) for one in measured if 4 * one["elements"] < nbytes})
    less = ", ".join(f"{family} {size >> 20} MiB" for family, size in smaller)
    parts = [
        _INTRODUCTION.read_text(encoding="utf-8").format(
            minutes=f"all targets, {took / 60:.0f} minutes on 2 cores",
            between=model.SAMPLED_GROUPS - 2,
            size=f"{nbytes >> 20} MiB",
            smaller=f"To save time, some families use less: {less}" if less else "All families use this size",
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
        *_fused(measured, modelled),
        *_candidates(measured, modelled),
        *_all([one for one in measured if one["family"] != "candidates"]),
    ]
    return "\n".join(parts) + "\n"


def _bounds() -> Iterable[str]:
    yield "## Bounds\n"
    yield f"The fill must be at least 1, and the chain at most {CHAIN:.0f}·√n for n elements. The maximum traffic is:"
    yield ""
    yield "| family | traffic | of each fused kernel |"
    yield "|---|---|---|"
    for name, family in FAMILIES.items():
        fused = family.fused or "–"
        yield f"| {name} | {'not bounded' if family.traffic is None else family.traffic} | {fused} |"
    yield ""


def _by_family(results: Sequence[Result], modelled: Sequence[Modelled]) -> Iterable[str]:
    yield "## By family and target\n"
    yield "For the cases of a family: median and maximum traffic, longest chain relative to its bound, smallest fill,"
    yield "and median and maximum of modelled time relative to ideal time.\n"
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
    yield "## Exceeded bounds\n"
    wrong = {(one["case"], one["wrong"]) for one in results if one["wrong"]}
    if wrong:
        yield "Wrong results:\n"
        yield from (f"- {case}: {what}" for case, what in sorted(wrong))
        yield ""
    by_case: dict[tuple[str, str], list[Finding]] = {}
    for one in results:
        for finding in beyond(one):
            by_case.setdefault((finding.measure, finding.case), []).append(finding)
    if not by_case:
        yield "None.\n"
        return
    yield "| measure | case | worst | bound | targets | reason |"
    yield "|---|---|---|---|---|---|"
    for (measure, case), found in sorted(by_case.items()):
        worst = (min if measure == "fill" else max)(found, key=lambda one: one.value)
        yield (
            f"| {measure} | {case} | {_number(worst.value)} | {_number(worst.bound)} | {len(found)} | "
            f"{worst.reason or 'unknown'} |"
        )
    yield ""


def _fused(results: Sequence[Result], modelled: Sequence[Modelled]) -> Iterable[str]:
    """Yield the traffic of the worst kernel of each compiled case."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}  # by case and target
    for one in results:
        if one.get("fused"):
            worst = max(one["fused"], key=lambda each: each["traffic"])
            found.setdefault(one["case"], {})[one["target"]] = worst
    if not found:
        return
    yield "## Fused kernels\n"
    yield "For each compiled case, the traffic of its worst kernel: the bytes that the kernel moves, relative to its"
    yield "minimum. The kernel is that of the target with the highest figure.\n"
    yield f"| case | kernel | {' | '.join(one.name.partition(' (')[0] for one in modelled)} |"
    yield f"|---|---|{'---|' * len(modelled)}"
    for case, of_case in found.items():
        kernel = max(of_case.values(), key=lambda each: each["traffic"])["kernel"]
        cells = [f"{of_case[one.name]['traffic']:.2f}" if one.name in of_case else "–" for one in modelled]
        yield f"| {case} | `{kernel}` | {' | '.join(cells)} |"
    yield ""


def _candidates(results: Sequence[Result], modelled: Sequence[Modelled]) -> Iterable[str]:
    """Yield the modelled times of the candidates for the same product or convolution."""
    found: dict[str, dict[str, dict[str, float]]] = {}  # by call, form and target
    for one in results:
        if one["family"] == "candidates":
            call, _, form = one["case"].partition(": ")
            of_form = found.setdefault(call, {}).setdefault(form, {})
            of_form[one["target"]] = one["figures"]["seconds"] * 1e3
    if not found:
        return
    yield "## Candidates\n"
    yield "Modelled milliseconds of products and convolutions, with the candidate that is chosen without tuning (usual)"
    yield "and with others: tile sizes, sums that are not divided among groups (whole), Winograd's algorithm. Times at"
    yield "least 3 % below the usual candidate's are bold. The model does not include arithmetic: it shows candidates"
    yield "that move too many bytes or have long chains, and does not rank the others.\n"
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
    yield "Each column has the worst value of all targets; groups are those of the target with the fewest.\n"
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
                f"{len(plain)} cases use one launch that fills the device, with coalesced accesses, minimum "
                f"traffic and a chain of at most 8: {', '.join(f'`{one}`' for one in plain)}."
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

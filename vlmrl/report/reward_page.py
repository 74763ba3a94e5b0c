"""Page of `vlmrl reward-check --html`: statistics of a reward's scores, with the most informative responses.

For two rewards, it lists the responses on which they differ most. If tricks were tried, it lists their scores.
Everything that comes from a model or a dataset is escaped. The page contains its images, reduced in size and within a
total limit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl.data.run_images import run_images
from vlmrl.redaction.redact import redact_value
from vlmrl.report.page_parts import (
    TRUTH,
    OverlayView,
    Picture,
    answer_text,
    drawn_by,
    fold_words,
    legend,
    marked_text,
    overlays_of,
    render,
    write_page,
)
from vlmrl.report.rollout_examples import Album, short_columns
from vlmrl.reward_check.probe import troubles
from vlmrl.reward_check.rescore import findings
from vlmrl.reward_check.response_tables import TableReader, row_images
from vlmrl.reward_check.tricks import ADVICE, WARNINGS, WORDS
from vlmrl.types import Score
from vlmrl.untrusted import visible

if TYPE_CHECKING:
    from markupsafe import Markup

    from vlmrl.reward_check.run import Checked
    from vlmrl.reward_check.scoring import SavedResponses


@dataclass(frozen=True)
class Finding:
    """Trick with a finding (see reward_check/tricks.py). `earned`: its mean score; None if the reward failed on it."""

    name: str
    idea: str
    earned: float | None
    paid: float | None
    error: str
    example: Markup
    of_example: str


@dataclass(frozen=True)
class ProbeFindings:
    """Findings of one verdict, its meaning and advice. `mild`: a policy cannot earn undeserved scores by them."""

    name: str
    words: str
    to_do: str
    mild: bool
    findings: Sequence[Finding]


@dataclass(frozen=True)
class ProbeView:
    """Tricks against the reward of one source. `report`: see `probe_reward`; `quiet`: tricks without a finding."""

    source: str
    report: Mapping[str, Any]
    findings: Sequence[ProbeFindings]
    quiet: Sequence[Mapping[str, Any]]
    troubles: Sequence[tuple[str, str]]


def _probe_view(source: str, report: Mapping[str, Any]) -> ProbeView:
    tricks = report["probes"]
    groups = []
    for verdict, words in WORDS.items():
        findings = [_finding(p) for p in tricks if p["verdict"] == verdict]
        if findings:
            groups.append(ProbeFindings(verdict, words, ADVICE[verdict], verdict in WARNINGS, findings))
    quiet = [p for p in tricks if not p["verdict"] and p["mean"] is not None]
    return ProbeView(source, report, groups, quiet, troubles(report["behaviour"]))


def _finding(p: Mapping[str, Any]) -> Finding:
    failed = p["errors"] and p["kind"] != "truth"
    error = f"fails on {p['errors']} rows: {p['error']}" if failed else ""
    return Finding(p["name"], p["idea"], p["mean"], p["paid"], error, marked_text(p["example"]), p["of_example"])


@dataclass(frozen=True)
class RowView:
    """Response on the page.

    Args:
        scores: (value, note) by each reward: one reward, or the two that are compared. None = the reward failed.
        parts: name of a part -> its value in each score.
        advantage: advantage by each of two rewards; None if the groups are not known or there is one reward.
        overlays: images with the boxes of the truth and those that the last reward read; () = the rows have no boxes.
        columns: the row's short texts, such as the expression that a box is asked for.
        artifacts, detail: images that the last reward made, and the detail that it returned.
        prompt: the prompt; "" or None if it is not known.
        folded: the line below which the response is folded; "" = it is not.
    """

    where: str
    text: Markup
    truth: Mapping[str, Any]
    columns: Mapping[str, str]
    pictures: Sequence[Picture]
    scores: Sequence[tuple[float | None, str]]
    parts: Mapping[str, Sequence[float | None]]
    advantage: tuple[float, float] | None
    artifacts: Sequence[tuple[str, Picture]] = ()
    overlays: Sequence[OverlayView] = ()
    detail: Markup | None = None
    prompt: Markup | None = None
    folded: str = ""


@dataclass(frozen=True)
class Section:
    """Section of the page with responses of one kind: title, explanation, responses."""

    title: str
    sentence: str
    rows: Sequence[RowView]


def write_reward_page(out: Path, saved: SavedResponses, checked: Checked) -> None:
    """Write the page, atomically. The folder of `out` is created.

    Raises: StoreError when it cannot be written, DataError when the table can no longer be read.
    """
    write_page(out, render_reward_page(saved, checked))


def render_reward_page(saved: SavedResponses, checked: Checked) -> str:
    """Return the page as text."""
    album, report, notes = Album(), checked.report, list(checked.report["notes"])
    kinds = _kinds(report)
    numbers = list(dict.fromkeys(row["row"] for *_, rows in kinds for row in rows))
    pictures = _pictures(saved, checked, numbers, album, notes)
    scored = findings(saved, checked.chosen, checked.samples)
    drawn = _drawn_again(numbers, checked)
    sections = []
    for title, sentence, rows in kinds:
        views = {row["row"]: _view(row, checked, pictures) for row in rows}
        views = {number: _with_findings(view, scored.get(number), album) for number, view in views.items()}
        shown = [_with_drawings(view, drawn.get(number), album) for number, view in views.items()]
        sections.append(Section(title, sentence, shown))
    both = report["diff"] and report["diff"]["names"]
    names = (reward["name"] for reward in report["rewards"].values())
    return render(
        "reward_page.html",
        title=f"{both['first']} \u2192 {both['second']}" if both else ", ".join(dict.fromkeys(names)),
        report=report,
        diff=report["diff"],
        probes=[_probe_view(source, probed) for source, probed in (report["probes"] or {}).items()],
        sections=sections,
        legend=legend(checked.samples[number].input.truth for number in numbers if drawn.get(number)),
        shared=album.shared(),
        left_out=album.left_out,
        notes=notes,
    )


def _kinds(report: Mapping[str, Any]) -> list[tuple[str, str, Sequence[Mapping[str, Any]]]]:
    """Return (title, explanation, rows) for each section of responses on the page."""
    errors, stored, disagreements, extremes = (report[k] for k in ("errors", "stored", "disagreements", "extremes"))
    kinds: list[tuple[str, str, Sequence[Mapping[str, Any]]]] = []
    diff = report["diff"]
    failures = {"The reward failed": errors}
    if diff is not None and diff["errors"] != errors:
        failures = {"The first reward failed": errors, "The second reward failed": diff["errors"]}
    kinds += [(title, f"On {e['number']:,} responses.", e["first"]) for title, e in failures.items() if e["number"]]
    if diff is not None:
        changed = diff["changed"]
        scored = "response that both can score" if any(diff["failed"].values()) else "response"
        sentence = "" if changed else f"Both rewards give every {scored} the same score."
        return [*kinds, ("Changed most", sentence, changed)]
    if stored is not None and stored["different"]:
        sentence = f"{stored['different']:,} scores differ from the stored ones; the first number is the stored one."
        kinds.append(("Not as stored", sentence, stored["worst"]))
    if disagreements is not None:
        wrong, right = disagreements["wrong"], disagreements["right"]
        if wrong["number"]:
            sentence = f"{wrong['paid']:,} of {wrong['number']:,} wrong answers earn more than the lowest score."
            kinds.append(("Wrong, yet earned most", sentence, disagreements["wrong_but_paid"]))
        if right["number"]:
            sentence = f"{right['unpaid']:,} of {right['number']:,} right answers earn less than the highest score."
            kinds.append(("Right, yet earned least", sentence, disagreements["right_but_unpaid"]))
    if extremes is not None:
        both = (("Earned most", extremes["paid_most"]), ("Earned least", extremes["paid_least"]))
        kinds += [(title, "", rows) for title, rows in both if rows]
    return kinds


def _pictures(
    saved: SavedResponses, checked: Checked, rows: Iterable[int], album: Album, notes: list[str]
) -> dict[int, list[Picture]]:
    """Return row -> its images and those of its tools.

    They are found by reference if the run is known, else in the table's column.
    """
    if isinstance(saved.reader, TableReader):
        images_of_rows = row_images(saved.reader, rows)
        return {row: [album.add_file(image) for image in images] for row, images in images_of_rows}
    if saved.run is None:
        return {}
    images = run_images(saved.run.dir)
    samples = {row: checked.samples[row] for row in rows}
    pictures = {row: [album.add(one, images) for one in (*s.media, *s.input.tool_media)] for row, s in samples.items()}
    notes += images.notes
    return pictures


def _view(row: Mapping[str, Any], checked: Checked, pictures: Mapping[int, Sequence[Picture]]) -> RowView:
    sample = checked.samples[row["row"]]
    first_score = row.get("old") or (row["stored"] if row["stored"] != row["new"] else None)
    scores = [score for score in (first_score, row["new"]) if score is not None]
    names = dict.fromkeys(name for score in scores for name in score["parts"])
    has_advantages = checked.report["diff"] is not None and checked.report["diff"]["advantages"] is not None
    return RowView(
        where=visible(sample.where),
        text=answer_text(sample.input.truth, sample.input.response),
        folded=fold_words(sample.input.truth, sample.input.response),
        truth=sample.input.truth,
        columns=short_columns(sample.input.columns),
        pictures=pictures.get(row["row"], ()),
        scores=[(score["value"], visible(score["error"] or score["note"])) for score in scores],
        parts={n: [score["parts"].get(n) for score in scores] for n in names},
        advantage=tuple(row["advantage"]) if has_advantages and "advantage" in row else None,
        prompt=marked_text(sample.input.prompt),
    )


def _with_findings(view: RowView, score: Score | None, album: Album) -> RowView:
    """Return the view with the detail and images from a second scoring, if this gave the same score."""
    if score is None or view.scores[-1][0] != score.value:
        return view
    images = [(visible(name), album.add_file(score.files[media.sha256])) for name, media in score.artifacts.items()]
    detail = None if score.detail is None else marked_text(json.dumps(redact_value(score.detail), ensure_ascii=False))
    overlays = overlays_of(view.truth, score.detail, len(view.pictures), lambda i: album.used(view.pictures[i]))
    return replace(view, artifacts=images, overlays=overlays, detail=detail)


def _drawn_again(rows: Iterable[int], checked: Checked) -> dict[int, Mapping[str, bytes] | str]:
    """Return row -> pictures of truth and response, where responses are code; see `Drawn.draw`.

    The pictures that the reward made, if it made any, show the same, but not the truth.
    """
    by_kind: dict[Any, list[int]] = {}
    for row in rows:
        drawn = drawn_by(checked.samples[row].input.truth)
        if drawn is not None:
            by_kind.setdefault(drawn.draw, []).append(row)
    drawings: dict[int, Mapping[str, bytes] | str] = {}
    for draw, own in by_kind.items():
        inputs = [checked.samples[row].input for row in own]
        drawings |= zip(own, draw([(x.truth, x.response) for x in inputs]), strict=True)
    return drawings


def _with_drawings(view: RowView, drawn: Mapping[str, bytes] | str | None, album: Album) -> RowView:
    """Return the view with the drawings of truth and response; those of the reward stay where there is no other."""
    if drawn is None:
        return view
    if isinstance(drawn, str):
        return replace(view, artifacts=[*view.artifacts, (TRUTH, album.add_file(drawn))])
    own = [(name, album.add_file(content)) for name, content in drawn.items()]
    return replace(view, artifacts=[*own, *(one for one in view.artifacts if one[0] not in drawn)])

"""Service of the rewards of a judge: draws responses in workers, then asks the judge, many at a time."""

from __future__ import annotations

import io
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from PIL import Image

from vlmrl.browser.client import Browser, BrowserServer
from vlmrl.errors import RewardError
from vlmrl.redaction.redact import excerpt
from vlmrl.rewards.base import NO_PLACE, ServicePlace
from vlmrl.rewards.outcomes import MOST_ARTIFACT_PIXELS
from vlmrl.rewards.text_rewards import ground_truth
from vlmrl.services.judge import JudgeService
from vlmrl.services.judge_prompt import JudgeRequest
from vlmrl.services.judge_settings import read_settings
from vlmrl.services.rubric import Judgement, load_rubric, read_rubric
from vlmrl.store.layout import JUDGE_FILE, runs_root
from vlmrl.svg.draw import Drawing, DrawJob, pixels_digest
from vlmrl.svg.parse import SvgLimits, find_svg
from vlmrl.svg.renderer import SvgRenderer
from vlmrl.tasks.judged.rewards import RENDER
from vlmrl.tasks.page.rewards import find_html
from vlmrl.types import RewardInput, RewardResult
from vlmrl.untrusted import CodeRefused, plural

OFFLINE = "VLMRL_JUDGE_OFFLINE"
"""Environment variable; 1 = judgements come from the cache alone, and nothing is sent."""
DRAWERS, LIMITS = 2, SvgLimits(cpu_seconds=30.0)
COUNTS = {
    "judge/calls": "calls",
    "judge/cached": "cached",
    "judge/shared": "deduped",
    "judge/retries": "retries",
    "judge/invalid": "invalid",
    "judge/unavailable": "unavailable",
    "judge/assumed": "assumed",
    "judge/input_tokens": "input_tokens",
    "judge/output_tokens": "output_tokens",
}
"""Metric -> counter of the judge."""
COST, ASSUMED_COST, UNPRICED = "judge/cost", "judge/assumed_cost", "judge/unpriced_calls"
MOST_REASON = 300


def open_judged(
    *,
    judge: Mapping[str, Any],
    rubric: str | Mapping[str, Any],
    render: str,
    key: str | None,
    place: ServicePlace = NO_PLACE,
) -> JudgedService:
    """Return the service for the arguments of `vlmrl.tasks.judged.rewards.judge`.

    An outage is reported at once: the scorer waits or masks, as `[reward] outage` and `[judge] outage` say.

    Args:
        place: folder of the run. Judgements are kept there; those of the runs folder are read, too.
    """
    settings = read_settings(judge)
    if settings.outage == "wait":
        settings = settings.model_copy(update={"outage": "mask"})
    folder = Path(place.folder) if place.folder is not None else runs_root()
    service = JudgeService(
        settings,
        rubric=load_rubric(rubric) if isinstance(rubric, str) else read_rubric(rubric, "rubric"),
        base_dir=Path() if settings.cache else folder,
        account=place.account,
        offline=os.environ.get(OFFLINE, "") == "1",
        also=[] if settings.cache or place.folder is None else [folder.parent / JUDGE_FILE],
        notify=lambda line: print(line, file=sys.stderr, flush=True),
    )
    return JudgedService(service, render=render, key=key)


class JudgedService:
    """Judge and renderer of one process."""

    def __init__(self, judge: JudgeService, *, render: str, key: str | None) -> None:
        self._judge = judge
        self._key = key
        drawer = "cairosvg" if render == "cairosvg" else "vlmrl"
        self._browser = BrowserServer(alone=True) if render == "html" else None
        self._renderer = None if render in ("none", "html") else SvgRenderer(DRAWERS, LIMITS, drawer=drawer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="judged")

    def submit(self, inputs: Sequence[RewardInput]) -> list[Future[RewardResult]]:
        """Begin to score responses; see `Service`."""
        futures: list[Future[RewardResult]] = [Future() for _ in inputs]
        self._thread.submit(self._begin, list(inputs), futures)
        return futures

    def try_out(self) -> dict[str, Any]:
        """Send one small request to the judge. See `Service`."""
        settings = self._judge.settings
        if self._judge.offline:
            return {"model": settings.name, "line": f"{settings.name}: offline ({OFFLINE}=1), nothing was sent"}
        answer = self._judge.preflight()
        tokens = [str(n) if n is not None else "?" for n in (answer.input_tokens, answer.output_tokens)]
        cost = "no prices set" if settings.prices is None else f"cost {answer.cost or 0.0:.6f}"
        line = (
            f"{answer.model} answers at {answer.address} in {answer.seconds:.1f} s; {tokens[0]} + {tokens[1]} tokens, "
            f"{cost}"
        )
        return {
            **{name: value for name, value in vars(answer).items() if name != "judgement"},
            **{name: getattr(settings, name) for name in ("concurrency", "max_calls", "max_cost")},
            "line": line,
        }

    def counts(self) -> dict[str, float]:
        """Return the judge's counts. See `Service`."""
        counters = self._judge.counters
        counts: dict[str, float] = {name: getattr(counters, field) for name, field in COUNTS.items()}
        has_prices = self._judge.settings.prices is not None
        costs = {COST: counters.cost, ASSUMED_COST: counters.assumed_cost}
        return {**counts, **(costs if has_prices else {UNPRICED: counters.calls})}

    def summary(self, counts: Mapping[str, float]) -> str:
        """Return the counts of a run in one line. See `Service`."""
        spent, limits = self._judge.spent(), self._judge.settings
        line = summary_of(counts)
        if not line or self._judge.offline or spent.calls <= counts.get("judge/calls", 0):
            return line
        cost = "" if limits.prices is None else f", cost {spent.cost:.4f}"
        return f"{line}; with earlier attempts {spent.calls:,} calls{cost}"

    def close(self) -> None:
        """End the judge and the renderer. Requests without an answer are given up."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._judge.close()
        for drawer in (self._renderer, self._browser):
            if drawer is not None:
                drawer.close()

    def _begin(self, inputs: Sequence[RewardInput], futures: Sequence[Future[RewardResult]]) -> None:
        try:
            drawings = self._drawn(inputs)
            sent = []
            for x, drawing, future in zip(inputs, drawings, futures, strict=True):
                if isinstance(drawing, CodeRefused):
                    parts = dict.fromkeys((RENDER, *self._judge.rubric.names), 0.0)
                    detail = {"refused": drawing.kind, "reason": drawing.reason}
                    complete(future, RewardResult(parts, f"not drawn: {drawing.reason}", detail))
                    continue
                try:
                    sent.append((self._request(x, drawing), drawing, future))
                except RewardError as error:
                    complete(future, error)
            for answer, (_, drawing, future) in zip(
                self._judge.submit([request for request, *_ in sent]), sent, strict=True
            ):
                answer.add_done_callback(lambda done, d=drawing, f=future: self._take(done, d, f))
        except BaseException as error:
            for future in futures:
                if not future.done():
                    complete(future, error)

    def _drawn(self, inputs: Sequence[RewardInput]) -> list[Drawing | CodeRefused | None]:
        """Return the drawing of each response, or why there is none; None where none is wanted."""
        if self._browser is not None:
            with Browser(self._browser.address, LIMITS.cpu_seconds) as browser:
                return [_shown(browser, x) for x in inputs]
        if self._renderer is None:
            return [None] * len(inputs)
        results: list[Drawing | CodeRefused | None] = []
        jobs: list[DrawJob] = []
        for x in inputs:
            try:
                jobs.append(DrawJob(find_svg(x.response), _drawn_size(_true_image(x))))
                results.append(None)
            except CodeRefused as error:
                results.append(error)
        drawn = iter(self._renderer.draw(jobs))
        return [next(drawn) if result is None else result for result in results]

    def _request(self, x: RewardInput, drawing: Drawing | None) -> JudgeRequest:
        if drawing is not None:
            return JudgeRequest(png_of(_true_image(x)), png_of(Image.fromarray(drawing.pixels)))
        truth = png_of(x.images[0]) if x.images else b""
        texts = [("answer to judge", x.response)]
        if self._key is not None:
            texts.insert(0, ("expected answer", str(ground_truth(x, self._key))))
        return JudgeRequest(truth, truth, tuple(texts))

    def _take(self, answer: Future[Judgement], drawing: Drawing | None, future: Future[RewardResult]) -> None:
        error = answer.exception() if not answer.cancelled() else RewardError("the request was cancelled")
        if error is not None:
            complete(future, error)
            return
        judgement = answer.result()
        rendered = {RENDER: 1.0} if drawing is not None else {}
        detail: dict[str, Any] = {"reason": excerpt(judgement.reason, MOST_REASON)}
        artifacts: dict[str, Any] = {}
        if drawing is not None:
            detail["digest"] = drawing.digest[:16]
            picture = Image.fromarray(drawing.pixels)
            artifacts["render"] = picture.resize(_within(picture.size, MOST_ARTIFACT_PIXELS))
        note = "the judge was down, which scores 0" if judgement.is_outage else ""
        complete(future, RewardResult({**rendered, **judgement.scores}, note, detail, artifacts))


def _shown(browser: Browser, x: RewardInput) -> Drawing | CodeRefused:
    """Return the picture of the HTML page in a response, at the size of the true one, or why there is none."""
    start = time.perf_counter()
    try:
        pixels = browser.look(find_html(x.answer), *_drawn_size(_true_image(x))).pixels
    except CodeRefused as error:
        return error
    return Drawing(pixels, pixels_digest(pixels), time.perf_counter() - start)


def summary_of(counts: Mapping[str, float]) -> str:
    """Return counts in one line; "" if nothing was asked."""
    calls, cached, shared = (int(counts.get(f"judge/{name}", 0)) for name in ("calls", "cached", "shared"))
    failed = int(counts.get("judge/unavailable", 0))
    if not calls + cached + shared + failed:
        return ""
    words = [f"{calls:,} call{plural(calls)}", f"{cached:,} judgement{plural(cached)} from the cache"]
    words += [f"{shared:,} shared with an equal picture"] if shared else []
    words += [f"{failed:,} without a judgement"] if failed else []
    unpriced = int(counts.get(UNPRICED, 0))
    beside = f" without {unpriced:,} calls that have no prices" if unpriced else ""
    words.append(f"cost {counts[COST]:.4f}{beside}" if COST in counts else "no prices set")
    if assumed := int(counts.get("judge/assumed", 0)):
        most = f": {counts[ASSUMED_COST]:.4f} of the cost is the most that they may cost" if COST in counts else ""
        words.append(f"{assumed:,} call{plural(assumed)} without an answer or a number of tokens{most}")
    return f"judge: {', '.join(words)}"


def complete(future: Future[RewardResult], outcome: RewardResult | BaseException) -> None:
    """Give a future its result or its error, unless it was cancelled."""
    if future.cancelled() or not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, RewardResult):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)


def _true_image(x: RewardInput) -> Image.Image:
    if not x.images:
        raise RewardError("the judge compares with the first image of the prompt, but the prompt has no image")
    return x.images[0]


def _drawn_size(image: Image.Image) -> tuple[int, int]:
    """Return the size at which responses are drawn: the picture's own, scaled down to what may be drawn.

    A large picture is not the response's fault.
    """
    return _within(image.size, SvgLimits().pixels)


def _within(size: tuple[int, int], most: int) -> tuple[int, int]:
    """Return a size of the same shape with at most that many pixels."""
    width, height = size
    scale = min(1.0, math.sqrt(most / (width * height)))
    return max(1, math.floor(width * scale)), max(1, math.floor(height * scale))


def png_of(image: Image.Image) -> bytes:
    """Return a picture as PNG, RGB."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()

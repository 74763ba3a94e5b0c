"""Measures of the task figures in evaluations: pictures, cleanliness, published rules, distances by models.

Each is given over all responses, with the worst value for those that cannot be drawn; over those that can be drawn, as
published; and for the truth beside itself. The models are LPIPS, and cosines of CLIP, DINO and SigLIP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from vlmrl.errors import VlmrlError
from vlmrl.metric import SHARE, Metric
from vlmrl.rewards.base import RewardSpec, WorkerFunction
from vlmrl.rewards.scoring import Scorer
from vlmrl.tasks.base import CEILING, VALID, Measures, MeasureSettings
from vlmrl.tasks.vfig.rewards import SECONDS, vfig_rules
from vlmrl.tasks.vfig.truth import CODE, code_of
from vlmrl.types import RewardInput, Score

if TYPE_CHECKING:
    import numpy as np


COSINES: dict[str, tuple[str, Literal["image_features", "pooler"]]] = {
    "clip": ("openai/clip-vit-base-patch32", "image_features"),
    "dino": ("facebook/dinov2-base", "pooler"),
    "siglip": ("google/siglip2-so400m-patch14-384", "image_features"),
}
"""Name -> published model, and what of it stands for a picture."""
LPIPS = "lpips"


@dataclass(frozen=True)
class PictureModel:
    """Model that compares pictures.

    Args:
        look: pictures, each (height, width, 3) uint8 RGB -> what the model sees in each.
        compare: what it sees in two pictures -> their cosine in [-1, 1], or for LPIPS their distance, >= 0.
    """

    look: Callable[[Sequence[np.ndarray]], Sequence[Any]]
    compare: Callable[[Any, Any], float]


def open_picture_model(name: str, source: str, device: str) -> PictureModel:
    """Load a model.

    Args:
        name: LPIPS, or one of COSINES.
        source: folder, or model of the hub; "" = the published one; for LPIPS see `Lpips`.
        device: as `model.device` of a recipe.
    Raises: CheckpointError if it cannot be loaded.
    """
    from PIL import Image

    from vlmrl.model.picture_models import Lpips, PictureFeatures

    if name == LPIPS:
        return PictureModel(list, Lpips(source, device).distance)
    published, output = COSINES[name]
    features = PictureFeatures(source or published, output, device)
    return PictureModel(
        lambda pictures: list(features.of([Image.fromarray(picture) for picture in pictures])),
        lambda one, other: float((one * other).sum()),
    )


RENDERED = "rendered"
DRAWN = ("ssim", "ssim_ink", "clean", "clean_published")
"""Measures of the workers of grader.py, besides RENDERED."""
RULES = {"rules": "overall", "rules_shapes": "shapes", "rules_arrows": "arrows"}
"""Measure -> part of the reward `vfig_rules`."""
VISUAL = "visual_sim"
"""Measure: the mean of COSINES."""
NAMES = (RENDERED, "ssim", "ssim_ink", LPIPS, *COSINES, VISUAL, "clean", "clean_published", *RULES)
OFFLINE = tuple(name for name in NAMES if name in (RENDERED, *DRAWN, *RULES))
WORST = {LPIPS: 1.0}
"""Value of a response that cannot be drawn, if it is not 0."""
SIGNED = (-1.0, 1.0)
METRICS: Mapping[str, Metric] = {
    **dict.fromkeys(OFFLINE, Metric("higher", SHARE)),
    **dict.fromkeys(("ssim", *COSINES, VISUAL), Metric("higher", SIGNED)),
    LPIPS: Metric("lower"),
}
BATCH = 32
"""Number of responses whose pictures are in memory at a time."""


def measures() -> Measures:
    """Return the measures of the task."""
    weights = {LPIPS: "", **{name: model for name, (model, _) in COSINES.items()}}
    return Measures(NAMES, OFFLINE, weights, FigureMeasurer)


class FigureMeasurer:
    """Measures of figures that are ready; see `Measurer`. Pictures are drawn in worker processes alone."""

    def __init__(self, settings: MeasureSettings) -> None:
        self.absent: dict[str, str] = {}
        self.problems: list[str] = []
        self._names = settings.names
        self._models = self._opened(settings)
        self._drawer = _scorer(_spec(bool(self._models)), settings)
        self._rules = _scorer(vfig_rules(key=CODE), settings) if set(RULES) & set(self._names) else None
        self._ceilings: dict[str, dict[str, float | None]] = {}

    def close(self) -> None:
        """End the worker processes, and forget the models."""
        self._models = {}
        for scorer in filter(None, (self._drawer, self._rules)):
            scorer.close()

    def measure(self, inputs: Sequence[RewardInput]) -> Sequence[Mapping[str, float | None]]:
        """Return the metrics of each response by name."""
        own = [number for start in range(0, len(inputs), BATCH) for number in self._numbers(inputs[start:][:BATCH])]
        for x in inputs:
            if code_of(x.truth) not in self._ceilings:
                self._ceilings[code_of(x.truth)] = self._numbers([replace(x, response=code_of(x.truth))])[0]
        metrics = [self._metrics(n, self._ceilings[code_of(x.truth)]) for n, x in zip(own, inputs, strict=True)]
        self._ceilings = {}  # of this chunk alone: memory must not grow with the rows
        return metrics

    def _metrics(self, own: Mapping[str, float | None], ceiling: Mapping[str, float | None]) -> dict[str, float | None]:
        """Return the metrics of a response. `own`: its measures; those of the parts that failed are missing.

        A measure that is not defined for the response, such as the cleanliness of a page without a shape, is the worst
        value where it is defined for the truth.
        """
        taken = [name for name in self._names if name not in self.absent]
        rendered = own.get(RENDERED)
        metrics: dict[str, float | None] = {}
        for name in taken:
            if name == RENDERED:
                metrics[name] = rendered
                continue
            value = own.get(name)
            best = ceiling.get(name)
            is_worst = rendered == 0.0 or (name in own and value is None and best is not None)
            metrics[name] = WORST.get(name, 0.0) if is_worst else value
            metrics[f"{name}/{VALID}"] = None if rendered == 0.0 else value
            metrics[f"{name}/{CEILING}"] = best
        return metrics

    def _numbers(self, inputs: Sequence[RewardInput]) -> list[dict[str, float | None]]:
        """Return the measures of a batch of responses."""
        scores = self._drawer.score(inputs)
        numbers = [dict(score.parts) for score in scores]
        for score in scores:
            self._note(score)
        for place, values in enumerate(self._by_models(scores)):
            numbers[place] |= values
        if self._rules is not None:
            for place, score in enumerate(self._rules.score(inputs)):
                self._note(score)
                if score.error is None:
                    numbers[place] |= {name: score.parts[part] for name, part in RULES.items()}
        return numbers

    def _note(self, score: Score) -> None:
        if score.error is not None:
            self.problems.append(score.error)

    def _by_models(self, scores: Sequence[Score]) -> list[dict[str, float]]:
        """Return what models measure on the pictures of each response."""
        values: list[dict[str, float]] = [{} for _ in scores]
        drawn = [place for place, score in enumerate(scores) if score.artifacts]
        if not drawn or not self._models:
            return values
        pictures = [picture for place in drawn for picture in _pictures(scores[place])]
        for name, model in self._models.items():
            seen = model.look(pictures)
            for place, truth, response in zip(drawn, seen[::2], seen[1::2], strict=True):
                values[place][name] = model.compare(truth, response)
        if VISUAL in self._names:
            for place in drawn:
                if COSINES.keys() <= values[place].keys():
                    values[place][VISUAL] = sum(values[place][name] for name in COSINES) / len(COSINES)
        return values

    def _opened(self, settings: MeasureSettings) -> dict[str, PictureModel]:
        """Return measure -> its model. What cannot be loaded is absent."""
        needed = [n for n in (LPIPS, *COSINES) if n in settings.names or (n in COSINES and VISUAL in settings.names)]
        models: dict[str, PictureModel] = {}
        for name in needed:
            try:
                models[name] = open_picture_model(name, settings.weights.get(name, ""), settings.device)
            except VlmrlError as error:
                self.absent[name] = error.message
        if VISUAL in settings.names and (missing := [n for n in COSINES if n in self.absent]):
            self.absent[VISUAL] = f"it is the mean of {', '.join(COSINES)}, and {' and '.join(missing)} is absent"
        return models


def _pictures(score: Score) -> list[Any]:
    """Return the pictures of truth and response, each (height, width, 3) uint8 RGB."""
    import numpy as np

    from vlmrl.data.images import decode_image

    return [np.asarray(decode_image(score.files[score.artifacts[name].sha256])) for name in ("truth", "response")]


def _scorer(spec: RewardSpec, settings: MeasureSettings) -> Scorer:
    return Scorer(
        spec, timeout_seconds=settings.timeout_seconds, memory_mb=settings.memory_mb, workers=settings.workers
    )


def _spec(pictures: bool) -> RewardSpec:
    """Return what the workers do, in the form of a reward: it has their limits of time and memory."""
    worker = WorkerFunction("figures", "vlmrl.tasks.vfig.grader", "make_measurer", {"pictures": pictures})
    ranges = {RENDERED: SHARE, **dict.fromkeys(DRAWN, SIGNED)}
    lost = {RENDERED: 0.0}
    return worker.reward(ranges, {RENDERED: 1.0}, seconds=SECONDS, on_timeout=lost, counts_work=True)

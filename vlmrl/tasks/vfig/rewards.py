"""Rewards for SVG code that ask nobody: `svg`, pictures as released models see them, and VFig's published rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vlmrl.errors import RewardError, unknown
from vlmrl.metric import SHARE
from vlmrl.rewards import Builtin
from vlmrl.rewards.base import RewardSpec, WorkerFunction

NAME = "svg"
SECONDS = 120.0
"""Time limit of one response, in seconds. It is far above what the counted work of a response takes."""
WEIGHTS = {"elements": 0.5, "picture": 0.35, "clean": 0.1, "length": 0.05}
PARTS = ("render", *WEIGHTS, "shapes", "lines", "texts", "accuracy")
POLICIES = ("refuse", "drop", "draw")


def svg_figure(*, key: str | None = None, images: str = "refuse", pictures: bool = False) -> RewardSpec:
    """Return a reward: the SVG code of a response beside the true one. All parts are 1 for the truth itself.

    Part `elements`, weight 0.5: shapes, lines with their heads and texts that can be seen, assigned one to one, by
    place, size, form, colour, direction and characters; missing and needless ones count alike. `picture`, 0.35: ink,
    edges and structure where there is ink; an empty picture earns 0. `clean`, 0.1, and `length`, 0.05: basic shapes
    instead of paths, and code that is not much longer than the truth; both times the mean of the first two. Reported:
    `render`, 1 if the response has SVG code that can be drawn; `shapes`, `lines`, `texts`: the elements of one kind;
    `accuracy`, 1 if elements and picture are at least 0.9.

    A response without SVG code, or with code that is forbidden or beyond a limit, earns 0, with the reason in its note.

    Args:
        key: truth field or column with the true SVG code; default: see `ground_truth`.
        images: what happens to embedded pictures: "refuse" = the code earns 0; "drop" = they are not drawn; "draw".
        pictures: whether the score has the artifacts `render` and `overlay`.
    Raises: RewardError for an unknown policy.
    """
    _require_policy(images)
    args = {"key": key, "images": images, "pictures": bool(pictures)}
    worker = WorkerFunction(NAME, "vlmrl.tasks.vfig.grader", "make_grader", args)
    return _drawn_reward(worker, PARTS, WEIGHTS, accuracy="accuracy")


def _drawn_reward(
    worker: WorkerFunction, parts: Iterable[str], weights: Mapping[str, float], **facts: Any
) -> RewardSpec:
    ranges = dict.fromkeys(parts, SHARE)
    return worker.reward(ranges, weights, seconds=SECONDS, counts_work=True, **facts)


def _require_policy(images: str) -> None:
    if images not in POLICIES:
        raise unknown("policy for images", str(images), POLICIES, error=RewardError)


MODELS = "svg_models"


def svg_models(
    *,
    lpips: bool | str = False,
    clip: bool | str = False,
    dino: bool | str = False,
    siglip: bool | str = False,
    device: str = "cpu",
    key: str | None = None,
    images: str = "refuse",
    pictures: bool = False,
) -> RewardSpec:
    """Return a reward: how like the true figure the drawing of a response is, as released models see pictures.

    One part for each model, by default of equal weight: 1 for a picture equal to the true one, 0 for one that is no
    more like it than its page alone, in proportion between. The likeness is the cosine of CLIP's, DINO's or SigLIP's
    vectors, or 1 - the distance of LPIPS. `render`, reported: 1 if the response has SVG code that can be drawn.

    Models see the picture alone, and can be deceived: `svg` belongs beside it.

    Args:
        lpips, clip, dino, siglip: whether a model is asked: true = the published one; a text = its folder, or a model
            of the hub.
        device: where the models run: each worker loads its own. On a processor, each worker has one thread.
        key: truth field or column with the true SVG code; default: see `ground_truth`.
        images: what happens to embedded pictures, as of `svg`.
        pictures: whether the score has the artifacts `render` and `overlay`.
    Raises: RewardError if no model is asked, or for a wrong argument.
    """
    _require_policy(images)
    choices = {"lpips": lpips, "clip": clip, "dino": dino, "siglip": siglip}
    for name, value in choices.items():
        if not isinstance(value, (bool, str)):
            hint = "true, false, or a folder or model of the hub"
            raise RewardError(f"`{name}` of `{MODELS}` is {value!r}", hint=hint)
    models = {name: value if isinstance(value, str) else "" for name, value in choices.items() if value}
    if not models:
        hint = f"args = {{ dino = true }}; its models: {', '.join(choices)}"
        raise RewardError(f"`{MODELS}` asks no model", hint=hint)
    args = {"key": key, "images": images, "models": models, "device": device, "pictures": bool(pictures)}
    worker = WorkerFunction(MODELS, "vlmrl.tasks.vfig.grader", "make_models_grader", args)
    return _drawn_reward(worker, ("render", *models), {name: 1 / len(models) for name in models})


RULES = ("overall", "shapes", "arrows")
"""Parts of the reward `vfig_rules`."""


def vfig_rules(*, key: str | None = None, metadata: str | None = None) -> RewardSpec:
    """Return VFig's published rule-based score as a reward: the mean of the scores of shapes and of arrows.

    It is the published evaluation to the digit, flaws included, to repeat its numbers: a truth scores less than 1
    beside itself where the rules cannot read it, and hidden copies score. `svg` is the reward to train with.

    Args:
        key: truth field or column with the true SVG code; default: see `ground_truth`.
        metadata: truth field or column with the shapes and arrows of the truth, as a mapping or its JSON text; None =
            they are read from the true SVG code, as published.
    """
    args = {"key": key, "metadata": metadata}
    worker = WorkerFunction("vfig_rules", "vlmrl.tasks.vfig.published.score", "make_grader", args)
    return _drawn_reward(worker, RULES, {"overall": 1.0})


REWARDS: Mapping[str, Builtin] = {
    NAME: Builtin(
        svg_figure,
        "SVG code: visible elements and picture beside the true ones; no model; runs in workers",
        version=4,
        shown=("pictures",),
    ),
    MODELS: Builtin(
        svg_models,
        "SVG code: its picture beside the true one, as LPIPS, CLIP, DINO or SigLIP see it; runs in workers",
        version=3,
        shown=("pictures", "device"),
    ),
    "vfig_rules": Builtin(
        vfig_rules, "SVG code: VFig's published score of shapes and arrows, to the digit, to repeat numbers", version=2
    ),
}

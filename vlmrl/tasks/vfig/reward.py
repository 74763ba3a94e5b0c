"""Rewards for SVG code that need no model: `svg`, and VFig's published rules."""

from __future__ import annotations

from vlmrl.errors import RewardError, unknown
from vlmrl.metric import SHARE
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.worker_code import WorkerFunction, in_this_process

NAME = "svg"
SECONDS = 5.0
"""Time limit of one response, in seconds."""
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
    if images not in POLICIES:
        raise unknown("policy for images", str(images), POLICIES, error=RewardError)
    worker = WorkerFunction(
        NAME, "vlmrl.tasks.vfig.grader", "make_grader", {"key": key, "images": images, "pictures": bool(pictures)}
    )
    return RewardSpec(
        NAME,
        in_this_process(worker),
        dict.fromkeys(PARTS, SHARE),
        WEIGHTS,
        accuracy="accuracy",
        on_timeout=dict.fromkeys(PARTS, 0.0),
        worker=worker,
        timeout_seconds=SECONDS,
    )


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
    worker = WorkerFunction("vfig_rules", "vlmrl.tasks.vfig.rules_grader", "make_grader", args)
    return RewardSpec(
        "vfig_rules",
        in_this_process(worker),
        dict.fromkeys(RULES, SHARE),
        {"overall": 1.0},
        on_timeout=dict.fromkeys(RULES, 0.0),
        worker=worker,
        timeout_seconds=SECONDS,
    )

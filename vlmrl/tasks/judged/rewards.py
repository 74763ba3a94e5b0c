"""Rewards of a judge as recipes name them: `judge` for any rubric, and `vfig`, which VFig published."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from vlmrl.errors import RewardError, unknown
from vlmrl.metric import SHARE
from vlmrl.recipe.tables import OF_SCORE
from vlmrl.rewards import Builtin
from vlmrl.rewards.base import RewardSpec, ServiceFunction
from vlmrl.rewards.service_pool import first_result
from vlmrl.services.judge_settings import read_settings
from vlmrl.services.rubric import BUILT_IN, load_rubric, read_rubric

RENDERS = ("svg", "cairosvg", "html", "none")
RENDER = "render"
"""Part that says whether the response could be drawn."""


def judge(
    *,
    judge: Mapping[str, Any] | None = None,
    rubric: str | Mapping[str, Any] | None = None,
    render: str = "svg",
    key: str | None = None,
) -> RewardSpec:
    """Return a reward: the scores of a model that compares a picture with the true one, by a rubric.

    Its parts are the axes of the rubric, with the rubric's weights. With `render = "svg"`, the picture is drawn from
    the SVG code of the response, at the size of the prompt's first image, which is the true one; part `render` is 1 if
    it can be drawn. Otherwise all parts are 0, and the judge is not asked. With "cairosvg", that package draws it, with
    the fonts of the machine; with "html", the browser shows its HTML code. With "none", the judge reads the text of the
    response beside the prompt's image.

    If the judge does not answer, the response has no score; it is never 0, except with `outage = "zero"`.

    Args:
        judge: the table `[judge]` of the recipe. A recipe may give one reward other values: they take priority.
        rubric: name of a built-in rubric, a TOML file, or the rubric itself; None = that of `[judge]`.
        render: "svg", "cairosvg", "html" or "none".
        key: for "none": truth field with a text that the judge sees as the expected answer; None = no text.
    Raises: RewardError without `[judge]`, or for an unknown value; RecipeError for wrong settings.
    """
    return _spec("judge", judge, rubric, render, key)


def vfig(*, judge: Mapping[str, Any] | None = None) -> RewardSpec:
    """Return the reward that VFig published: presence, layout, connectivity and details, 0.25 each, by a judge.

    The judge sees what cairosvg draws. A response whose SVG code cannot be drawn earns 0, and the judge is not asked.
    Unlike there, an outage is no 0.

    Args:
        judge: as for the reward `judge`.
    Raises: as `judge`.
    """
    return _spec("vfig", judge, "vfig", "cairosvg", None)


def _spec(
    name: str, table: Mapping[str, Any] | None, rubric: str | Mapping[str, Any] | None, render: str, key: str | None
) -> RewardSpec:
    if not table or not table.get("model"):
        raise RewardError(
            f"reward `{name}` needs a judge, and the recipe has no table `[judge]` with a model",
            hint='add one: [judge] provider = "gemini", model = "..."; or provider = "vllm" for a server of your own',
        )
    if render not in RENDERS:
        raise unknown("render", str(render), RENDERS, error=RewardError)
    if render == "cairosvg" and find_spec("cairosvg") is None:
        raise RewardError(
            f"reward `{name}` draws with cairosvg, and that package is not installed", hint="pip install cairosvg"
        )
    settings = read_settings({**table, **({"rubric": rubric} if isinstance(rubric, str) else {})})
    axes = read_rubric(rubric, "rubric") if isinstance(rubric, Mapping) else load_rubric(settings.rubric)
    # The record holds a rubric of one's own as a whole: its file may change, and is not there on another machine.
    chosen = settings.rubric if axes is BUILT_IN.get(settings.rubric) else axes.model_dump(mode="json")
    values = settings.model_dump(exclude_defaults=True, exclude={"rubric"})
    args: dict[str, Any] = {
        "judge": {k: v for k, v in settings.model_dump().items() if k in OF_SCORE and k != "rubric"}
    }
    if name != "vfig":
        args |= {"rubric": chosen, "render": render, **({"key": key} if key is not None else {})}
    free_args = {k: v for k, v in values.items() if k not in OF_SCORE}
    opening = {"judge": values, "rubric": chosen, "render": render, "key": key}
    service = ServiceFunction(name, "vlmrl.tasks.judged.service", "open_judged", opening)
    ranges = {**({RENDER: SHARE} if render != "none" else {}), **dict.fromkeys(axes.names, SHARE)}
    return RewardSpec(
        name,
        first_result(service),
        ranges,
        dict(axes.weights),
        needs_images=True,
        args=args,
        free_args={"judge": free_args} if free_args else {},
        service=service,
    )


REWARDS: Mapping[str, Builtin] = {
    "judge": Builtin(judge, "a model as a judge: compares the drawn response with the picture, by a rubric", version=1),
    "vfig": Builtin(vfig, "VFig's published reward for SVG code: a judge on four axes; needs [judge]", version=2),
}

"""Attacks made from each domain's own form: the published rewards are full of holes, the default ones have none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vlmrl.reward_check.probe import probe_reward
from vlmrl.rewards.base import UNSCORED
from vlmrl.tasks import TASKS, make_task
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.tasks.taxonrl.domains import DOMAINS, LAYOUTS
from vlmrl.tasks.taxonrl.task import answer_form
from vlmrl.types import RewardInput

TRUTHS = {
    "fungi": [
        "1;Boletaceae;Boletus;Boletales;edulis;Boletaceae;Boletus;Boletales;edulis",
        "0;Boletaceae;Boletus;Boletales;edulis;Boletaceae;Suillus;Boletales;luteus",
        "0;Agaricaceae;Agaricus;Agaricales;x;Boletaceae;Boletus;Boletales;y",
        "0;Agaricaceae;Agaricus;Agaricales;x;Agaricaceae;Agaricus;Agaricales;y",
    ],
    "bird": [
        "1;sameSpecies;Corvus;Corvidae;Passeriformes;Corvus;Corvidae;Passeriformes",
        "0;sameGenus;Corvus;Corvidae;Passeriformes;Corvus;Corvidae;Passeriformes",
        "0;sameOrder;Corvus;Corvidae;Passeriformes;Parus;Paridae;Passeriformes",
        "0;sameClass;Corvus;Corvidae;Passeriformes;Picus;Picidae;Piciformes",
    ],
    "sea_star": ["1;Asru;Asru", "0;Asru;Anau", "0;Anau;Anau", "1;Anau;Anau"],
    "chimp": ["1;Adult;M;Adult;M", "0;SubAdult;F;Adult;M", "0;Infant;F;Juvenile;F", "1;SubAdult;F;SubAdult;F"],
    "gorilla": [
        "1;Silverback;Silverback",
        "0;Adult female;Infant",
        "0;Blackback;Blackback",
        "1;Adult female;Adult female",
    ],
    "human": ["1", "0", "1", "0"],
    "whale": ["1", "0", "0", "1"],
}
VARIANTS = [(name, variant) for name in DOMAINS for variant in DOMAINS[name].variant_names]


def probed(name, variant, profile):
    task = make_task(name, {"name": "x"}, variant)
    reward, args = task.profile(profile)
    spec = load_reward(reward, args=args)
    layout = LAYOUTS[name if name in LAYOUTS else "answer"]
    rows = []
    for text in TRUTHS[name]:
        truth = layout.read(text)
        if profile == "taxonrl":
            truth["ground_truth"] = text if variant != "baseline" else text.split(";")[0]
        rows.append(RewardInput("", truth))
    return probe_reward(spec, spec.weights, rows, probe=task.kind.probe, echo=task.template)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_nothing_pays_against_the_default_rewards(name, variant):
    report = probed(name, variant, "default")
    found = {p["name"]: (p["verdict"], p["mean"], p["error"]) for p in report["probes"] if p["verdict"]}
    assert found == {} and report["flagged"] == report["warnings"] == report["unsteady"] == 0
    honest = report["honest"]
    assert honest["informed"] > 0.98 > honest["uninformed"] > honest["wrong"]
    assert len(report["probes"]) >= 30


EVERYWHERE = {
    "answer in think": "hole",  # R1: format reads the last answer, the scorer the first
    "two thinks": "hole",  # R2
    "empty think": "hole",  # R3
    "other digits": "hole",  # R4
    "half sure": "improper",  # R7
    "cut off late": "hole",  # R17
    "no truth at all": "silent",  # R5
}
WITH_NAMES = {
    "bare number": "leak",  # R6
    "out of range": ("leak", "hole"),  # R4
    "silence": ("leak", "hole"),  # R11, R17
    "names outside": "hole",  # R17
    "wrong, then right": ("leak", "hole"),  # R12: the first tag wins
    "right, then wrong": "hole",  # R12
    "both answers": "leak",
    "taken back": "hole",
    "never closed": "leak",
    "tags crossed": ("leak", "hole"),  # R20
}
ONLY = {
    ("fungi", "im_concrete"): {
        "nothing": "leak",
        "thought only": "leak",  # R11: silence about a level that differs
        "rank words": "unfair",
        "full stops": "unfair",  # R13
        "names repeated": "hole",
        "surplus names": "hole",  # R14
    },
    ("bird", "im_concrete"): {"nothing": "leak", "rank words": "unfair", "surplus names": "hole"},
    ("bird", "im_basic"): {"nothing": "leak", "empty fields": "leak"},
    ("sea_star", "im"): {"labels denied": "hole", "every label": "hole", "escaped tags": "leak"},  # R19
    ("chimp", "im"): {"hyphens": "unfair"},  # R18
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_the_known_flaws_of_the_published_rewards_are_found(name, variant):
    report = probed(name, variant, "taxonrl")
    verdicts = {p["name"]: p["verdict"] for p in report["probes"]}
    wanted = {**EVERYWHERE, **(WITH_NAMES if variant != "baseline" else {}), **ONLY.get((name, variant), {})}
    missed = {
        trick: (verdict, verdicts.get(trick))
        for trick, verdict in wanted.items()
        if verdicts.get(trick) not in (verdict if isinstance(verdict, tuple) else (verdict,))
    }
    assert missed == {} and report["flagged"] >= 5


UNFORMED = (
    "table",
    "digits",
    "pairs",
    "geometry3k",
    "mm_math",
    "geoqa",
    "text_math",
    "we_math",
    "counting",
    "grounding",
    "detection",
    "figures",
    "crop",
    "agent_code",
    "agent_search",
    "gui",
    "page",
)
"""Tasks of other forms, which have tests of their own."""


def test_every_task_with_a_form_is_attacked():
    assert {name for name in TASKS if name not in UNFORMED} == set(TRUTHS)


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_honest_answers_are_in_the_form_that_the_tasks_own_measure_reads(name, variant):
    task = make_task(name, {"name": "x"}, variant)
    form = answer_form(DOMAINS[name], DOMAINS[name].variant(task.variant))
    layout = LAYOUTS[name if name in LAYOUTS else "answer"]
    for text in TRUTHS[name]:
        x = RewardInput("", layout.read(text))
        honest = form.write(form.names_of(x), 0.9 if x.truth["same"] else 0.1)
        right = task.outcome(replace(x, response=honest), UNSCORED)
        assert right["accuracy"] == 1.0 and right["parse_failure"] == 0.0, (text, right)

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from domain_builders import TRUTHS, write_dataset

from vlmrl.errors import DataError, RecipeError
from vlmrl.recipe.schema import Data, Reward
from vlmrl.rewards.base import UNSCORED, split_result
from vlmrl.tasks import TASKS, make_task
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.tasks.prompt import IMAGE, place_images, render_user
from vlmrl.tasks.source import open_source, reward_of
from vlmrl.tasks.taxonrl.domains import DOMAINS, LAYOUTS, Domain, Variant, known_fields, truth_distance
from vlmrl.tasks.taxonrl.rewards import FUNCTIONS
from vlmrl.types import Media, Message, RewardInput, Row

VARIANTS = [(domain, variant) for domain in DOMAINS.values() for variant in domain.variants]
IDS = [f"{domain.name}-{variant.name}" for domain, variant in VARIANTS]
every_variant = pytest.mark.parametrize(("domain", "variant"), VARIANTS, ids=IDS)


def row_of(name: str, **columns: Any) -> Row:
    media = (Media("a" * 64, 8, 8), Media("b" * 64, 8, 8))
    return Row("r", "s", name, TRUTHS[name], media, columns)


def prompt_of(domain: Domain, variant: Variant, **columns: Any) -> str:
    task = make_task(domain.name, {}, variant.name)
    return render_user(task.template, row_of(domain.name, **columns), task.variables, where=task.template_file)


def test_the_table_has_the_seven_domains_with_their_variants() -> None:
    assert {name: domain.variant_names for name, domain in DOMAINS.items()} == {
        "fungi": ("baseline", "im_concrete"),
        "bird": ("baseline", "im_basic", "im_concrete"),
        "sea_star": ("baseline", "im"),
        "chimp": ("baseline", "im", "im_named"),
        "gorilla": ("baseline", "im"),
        "human": ("baseline",),
        "whale": ("baseline",),
    }
    assert all(name in TASKS for name in DOMAINS)


@every_variant
def test_what_a_variant_asks_for_is_in_the_truth_and_its_published_function_exists(
    domain: Domain, variant: Variant
) -> None:
    assert set(variant.required_fields) <= set(domain.field_names) == set(LAYOUTS[domain.layout].fields)
    assert (variant.form == "answer") == (not variant.required_fields)
    assert variant.published in FUNCTIONS
    assert FUNCTIONS[variant.published].layout == (domain.layout if variant.required_fields else "answer")


def test_im_is_the_main_variant_and_the_default_is_what_the_dataset_has_the_truth_for() -> None:
    assert make_task("fungi", {}).variant == make_task("fungi", {}, "im").variant == "im_concrete"
    assert make_task("chimp", {}, "im").variant == "im" and make_task("whale", {}).variant == "baseline"
    known = {"truth_fields": ["order", "family"]}
    assert make_task("fungi", known).variant == "baseline"
    with pytest.raises(DataError, match="variant `im` of task `fungi` needs the truth of `genus`, and no row has it"):
        make_task("fungi", known, "im")
    assert make_task("fungi", known, "baseline").variant == "baseline"


def test_a_variant_that_does_not_exist_is_named_with_the_nearest() -> None:
    with pytest.raises(RecipeError, match="unknown variant `im_concret` of task `bird`") as caught:
        make_task("bird", {}, "im_concret")
    assert caught.value.hint == "did you mean `im_concrete`?  known: baseline, im_basic, im_concrete, im"
    with pytest.raises(RecipeError, match="known: none"):
        make_task("pairs", {"levels": ["a"]}, "im")
    with pytest.raises(RecipeError, match="unknown reward profile `taxonrl` of task `pairs`"):
        make_task("pairs", {"levels": ["a"]}).profile("taxonrl")


def test_known_fields_are_those_that_some_row_knows() -> None:
    truths = [{"age_group": [None, "Adult"], "gender": None}, {"age_group": ["Adult", "Infant"], "gender": ["F", None]}]
    assert known_fields(DOMAINS["chimp"], truths) == ["age_group"]


@pytest.mark.parametrize(
    ("names", "distance"),
    [
        ({"order": ["A", "B"]}, 4),
        ({"order": ["A", "A"], "family": ["C", "D"]}, 3),
        ({"order": [None, "A"], "family": ["C", "C"], "genus": ["E", "F"]}, 2),
        ({"genus": ["E", "e."]}, 1),
        ({"family": ["C", "D"]}, None),  # the orders are not known
        ({}, None),
    ],
)
def test_the_distance_of_different_pairs_is_what_the_names_leave_no_doubt_about(
    names: dict[str, Any], distance: int | None
) -> None:
    assert truth_distance(DOMAINS["bird"], {"same": False, **names}) == distance
    assert truth_distance(DOMAINS["bird"], {"same": True}) == 0
    assert truth_distance(DOMAINS["whale"], {"same": True}) is None


def test_a_recipe_names_variant_and_profile(tmp_path: Path) -> None:
    path = str(write_dataset(tmp_path / "d", "fungi", [TRUTHS["fungi"]], truth_fields=list(LAYOUTS["fungi"].fields)))
    source = open_source(Data(path=path), Reward())
    assert (source.task.variant, source.reward.name) == ("im_concrete", "taxonomy")
    assert source.template_path == "tasks/taxonrl/fungi/im_concrete.jinja"
    baseline = open_source(Data(path=path, variant="baseline"), Reward())
    assert (baseline.task.variant, baseline.reward.name) == ("baseline", "pair_answer")
    assert baseline.prompt_sha256 != source.prompt_sha256
    published = open_source(Data(path=path), Reward(profile="taxonrl", args={"format_weight": 0.1}))
    assert published.reward.name == "taxonrl"
    assert published.reward.args == {
        "function": "lfw_fungi_im:compute_score_gemini",
        "layout": "fungi",
        "format_weight": 0.1,
    }
    with pytest.raises(RecipeError, match="unknown reward profile `taxon`"):
        open_source(Data(path=path), Reward(profile="taxon"))
    lacking = make_task("pairs", {"levels": ["a"]})
    named = reward_of(Data(path="rows.jsonl", reward="exact_match"), Reward(profile="taxonrl"), lacking)
    assert named[0].name == "exact_match"
    other = open_source(Data(path=path, reward="exact_match"), Reward(profile="taxonrl"))
    assert other.reward.name == "exact_match"


@every_variant
def test_a_prompt_asks_with_the_rows_own_question_where_it_has_one(domain: Domain, variant: Variant) -> None:
    own = prompt_of(domain, variant)
    assert own.count(IMAGE) == 2 and own.startswith("<image><image>\nDo these two photographs show ")
    published = prompt_of(domain, variant, problem=" <image>One <image>two: the same?\n")
    assert published.startswith("<image>One <image>two: the same?\n\nFirst think, between <think> and </think>")
    assert published.count(IMAGE) == 2 and "Do these two photographs" not in published
    assert own.partition("First think")[2] == published.partition("First think")[2]
    assert prompt_of(domain, variant, problem="") == prompt_of(domain, variant, problem=None) == own
    place_images((Message("user", published),), row_of(domain.name))


@every_variant
def test_a_prompt_shows_its_tags_literally_and_its_closed_vocabulary(domain: Domain, variant: Variant) -> None:
    prompt = prompt_of(domain, variant)
    assert "\\" not in prompt and "&lt;" not in prompt and "&gt;" not in prompt and "`" not in prompt
    assert prompt.endswith("\n<answer>probability</answer>")
    for name in variant.required_fields:
        field = domain.truth_field(name)
        assert f"<{field.tag}>" in prompt and all(label in prompt for label in field.labels)
    assert "{" not in prompt and not re.search(r"\n{3}| \n", prompt)


def score(domain: Domain, variant: Variant, truth: dict[str, Any], text: str, profile: str = "default") -> Any:
    name, args = make_task(domain.name, {}, variant.name).profile(profile)
    assert name is not None
    spec = load_reward(name, args=args)
    return split_result(spec.fn(RewardInput(text, truth)))[:2]


@every_variant
def test_the_form_that_a_prompt_shows_earns_full_format_when_it_is_filled_in(domain: Domain, variant: Variant) -> None:
    truth = TRUTHS[domain.name] | {"same": True, "distance": 0 if domain.levels else None}
    for name in domain.field_names:
        truth[name] = [next(one for one in TRUTHS[domain.name][name] if one)] * 2
    shown = prompt_of(domain, variant).rpartition("<think>")
    form = shown[1] + shown[2]
    filled = form.replace("probability", "0.9000").replace("verdict", "Same")
    for name in variant.required_fields:
        tag, label = domain.truth_field(name).tag, truth[name][0]
        body = f"Image1={label}; Image2={label}" if variant.form == "named_labels" else f"{label}; {label}"
        if variant.form != "agreements":
            filled = re.sub(f"<{tag}>[^<]*</{tag}>", f"<{tag}>{body}</{tag}>", filled)
    parts, note = score(domain, variant, truth, filled)
    assert note == "" and parts["format"] == 1.0, filled
    assert all(part == 1.0 for name, part in parts.items() if name != "answer")
    assert (
        make_task(domain.name, {}, variant.name).outcome(RewardInput(filled, truth), UNSCORED)["parse_failure"] == 0.0
    )
    published, _ = score(domain, variant, truth, filled, "taxonrl")
    assert published["format"] == 1.0


@every_variant
def test_an_echo_of_the_prompt_or_of_its_form_earns_nothing(domain: Domain, variant: Variant) -> None:
    prompt = prompt_of(domain, variant)
    shown = prompt.rpartition("<think>")
    for text in (prompt, shown[1] + shown[2], prompt + shown[1] + shown[2]):
        parts, _ = score(domain, variant, TRUTHS[domain.name], text)
        assert not any(parts.values()), text


SAME = {
    "fungi": {"order": ["O", "O"], "family": ["F", "F"], "genus": ["G", "G"], "species": ["G s", "G s"]},
    "bird": {"order": ["O", "O"], "family": ["F", "F"], "genus": ["G", "G"]},
}


def pairs_of(domain: Domain) -> list[dict[str, Any]]:
    """Truths of every distance, same and different, of a domain."""
    if not domain.levels:
        return [TRUTHS[domain.name] | {"same": same} for same in (True, False)]
    found = []
    for distance in range(5):
        truth = {"same": distance == 0, "distance": distance, **{k: list(v) for k, v in SAME[domain.name].items()}}
        for steps, name in enumerate(("species", "genus", "family", "order"), start=1):
            if steps <= distance and name in truth:
                truth[name] = [truth[name][0], "x" + truth[name][0]]
        found.append(truth)
    return found


@every_variant
def test_a_trace_earns_everything_but_the_doubt_in_its_answer(domain: Domain, variant: Variant) -> None:
    task = make_task(domain.name, {}, variant.name)
    assert task.trace is not None
    for truth in pairs_of(domain):
        assert task.validate(truth) == []
        row = replace(row_of(domain.name), truth=truth)
        for seed in range(8):
            text = task.trace(row, random.Random(seed))
            parts, note = score(domain, variant, truth, text)
            assert note == "" and parts["answer"] >= 0.84
            assert all(part == 1.0 for name, part in parts.items() if name != "answer"), (text, parts)
            outcome = task.outcome(RewardInput(text, truth), UNSCORED)
            assert outcome["accuracy"] == 1.0 and outcome["parse_failure"] == 0.0
            assert all(value in (1.0, None) for name, value in outcome.items() if name.startswith("accuracy"))
            assert outcome.get("consistent", 1.0) in (1.0, None)
            published, _ = score(domain, variant, truth, text, "taxonrl")
            extra = {"taxonomy", "age_group", "species"} & set(published)
            assert published["format"] == 1.0 and all(published[name] == 1.0 for name in extra), (text, published)


def test_traces_read_well() -> None:
    def trace(name: str, variant: str, **changes: Any) -> str:
        task = make_task(name, {}, variant)
        assert task.trace is not None
        return task.trace(replace(row_of(name), truth=TRUTHS[name] | changes), random.Random(0))

    assert trace("fungi", "im") == (
        "<think>\nBoth belong to the order Boletales.\n<order>Boletales; Boletales</order>\n"
        "Both belong to the family Boletaceae.\n<family>Boletaceae; Boletaceae</family>\n"
        "The first belongs to the genus Boletus, the second to the genus Suillus.\n<genus>Boletus; Suillus</genus>\n"
        "So they are of different species.\n</think>\n<answer>0.3000</answer>"
    )
    assert trace("bird", "im_basic", order=[None, None]) == (
        "<think>\nThe two are of different orders.\n<order>Different</order>\n"
        "So they are of different species.\n</think>\n<answer>0.3000</answer>"
    )
    assert trace("chimp", "im_named") == (
        "<think>\n<age-group>Image1=SubAdult; Image2=Infant</age-group>\n"
        "The age group of the chimpanzee in image 1 is SubAdult, in image 2 Infant.\n"
        "The images show two different individuals.\n</think>\n<answer>0.3000</answer>"
    )
    assert trace("human", "baseline") == (
        "<think>\nThe images show the same person.\n</think>\n<answer>0.7000</answer>"
    )


def test_a_row_that_does_not_know_what_a_response_must_state_has_no_trace() -> None:
    trace = make_task("fungi", {}).trace
    assert trace is not None
    with pytest.raises(DataError, match="the row does not know its `family`") as caught:
        trace(replace(row_of("fungi"), truth=TRUTHS["fungi"] | {"family": [None, "A"]}), random.Random(0))
    assert caught.value.where == "row r of s"


def test_a_published_baseline_reads_the_answer_of_rows_that_have_more() -> None:
    # lfw:compute_score on `0;Boletaceae;...` gives 0 for every answer; TaxonRL gave it the column `answer`.
    domain, text = DOMAINS["fungi"], "<think>x</think><answer>0.1000</answer>"
    raw = LAYOUTS["fungi"].write(TRUTHS["fungi"]) + " "
    for truth in (TRUTHS["fungi"], TRUTHS["fungi"] | {"ground_truth": raw}):
        parts, _ = score(domain, domain.variant("baseline"), truth, text, "taxonrl")
        assert parts["accuracy"] == pytest.approx(1 + math.log(0.9)) and parts["format"] == 1.0
    assert load_reward("taxonrl", args={"function": "lfw:compute_score"}).fn(RewardInput(text, truth))["accuracy"] == 0


@pytest.mark.parametrize(
    ("distance", "agreements"),
    [
        (0, ["Same", "Same", "Same"]),
        (1, ["Same", "Same", "Same"]),
        (2, ["Same", "Same", "Different"]),
        (3, ["Same", "Different"]),
        (4, ["Different"]),
    ],
)
def test_agreements_can_be_written_from_the_distance_alone(distance: int, agreements: list[str]) -> None:
    domain = DOMAINS["bird"]
    truth = {"same": distance == 0, "distance": distance, "order": None, "family": [None, None], "genus": None}
    task = make_task("bird", {}, "im_basic")
    assert task.trace is not None
    text = task.trace(replace(row_of("bird"), truth=truth), random.Random(1))
    assert re.findall(r"<(?:order|family|genus)>(\w+)</", text) == agreements
    parts, note = score(domain, domain.variant("im_basic"), truth, text)
    assert note == "" and all(part == 1.0 for name, part in parts.items() if name != "answer")

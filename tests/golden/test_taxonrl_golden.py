"""The profile `taxonrl` against numbers that the published functions computed (max-vkl/TaxonRL at f4b80ac).

Each file holds inputs of taxonrl/generate.py, in batches, and what each function of the domain made of them.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path

import pytest
from published_batches import score_batch

from vlmrl.rewards.scoring import Scorer
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.tasks.taxonrl.domains import LAYOUTS
from vlmrl.tasks.taxonrl.rewards import FUNCTIONS
from vlmrl.types import RewardInput

FILES = sorted((Path(__file__).parent / "taxonrl").glob("*.json.gz"))


def read(file: Path) -> dict:
    return json.loads(gzip.decompress(file.read_bytes()))


def test_every_function_and_every_domain_has_its_numbers():
    assert [file.name.removesuffix(".json.gz") for file in FILES] == sorted(LAYOUTS)
    assert {function for file in FILES for function in read(file)["expected"]} == set(FUNCTIONS)
    assert sum(file.stat().st_size for file in FILES) < 2_000_000


@pytest.mark.slow
def test_the_inputs_are_those_of_the_generator():
    spec = importlib.util.spec_from_file_location("generate", Path(__file__).parent / "taxonrl" / "generate.py")
    assert spec and spec.loader
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for file in FILES:
        first = [list(sample) for sample in generate.samples(file.name.removesuffix(".json.gz"), 200, seed=7)]
        assert json.dumps(read(file)["inputs"][:200]) == json.dumps(first)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.removesuffix(".json.gz"))
def test_every_part_is_the_published_one(file):
    golden = read(file)
    for function, expected in golden["expected"].items():
        parts = dict.fromkeys(expected["parts"], 0.0)
        for start in range(0, len(golden["inputs"]), golden["batch"]):
            batch = golden["inputs"][start : start + golden["batch"]]
            scored = score_batch(function, batch, expected["format_weight"])
            for i, (ours, theirs) in enumerate(zip(scored, expected["numbers"][start:], strict=False)):
                assert set(ours) == set(parts), function
                worst = max(abs(ours[name] - number) for name, number in zip(parts, theirs, strict=True))
                assert worst <= 1e-9, (function, batch[i], ours, theirs)
                parts = {name: parts[name] + number for name, number in zip(parts, theirs, strict=True)}
        never = [name for name, total in parts.items() if total == 0]
        assert not never, f"{function}: {never} is 0 for every input, so nothing was compared"


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.removesuffix(".json.gz"))
def test_the_value_of_the_reward_is_the_published_overall(file):
    golden = read(file)
    inputs = [RewardInput(response, {"ground_truth": truth}) for response, truth in golden["inputs"]]
    for function, expected in golden["expected"].items():
        args = {"function": function, "format_weight": expected["format_weight"]}
        scores = Scorer(load_reward("taxonrl", args=args)).score(inputs, strict=True)
        overall = list(expected["parts"]).index("overall")
        wrong = [i for i, s in enumerate(scores) if abs(s.value - expected["numbers"][i][overall]) > 1e-9]
        assert not wrong, (function, golden["inputs"][wrong[0]])

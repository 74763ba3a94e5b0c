"""Python code of a model's folder: a run, maybe a stranger's, never turns it on by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import this_process
from endpoint_server import failure, serve_endpoint
from test_hostile_runs import ended, origin, project, run_dir, seal_checkpoints

from vlmrl.launch.request import TrainRequest
from vlmrl.launch.start import resume_command
from vlmrl.recipe.load import load_recipe

__all__ = ["origin", "project"]
CONSENT = ("--set", "model.trust_remote_code=true")
CODE = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
class OwnConfig(Qwen2_5_VLConfig):
    model_type = "own"
class OwnModel(Qwen2_5_VLForConditionalGeneration):
    config_class = OwnConfig
"""
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("eval", "RUN", "--max-rows", "1", "--force"),
    ("eval", "checkpoint", "--max-rows", "1", "--force"),
    ("eval", "model", "--recipe", "RUN", "--max-rows", "1"),
    ("eval", "model", "--recipe", "runs-recipe.toml", "--max-rows", "1"),
    ("generate", "RUN", "--max-rows", "1", "--out", "answers.jsonl"),
    ("reward-check", "RUN"),
    ("merge", "RUN", "--out", "merged"),
    ("train", "--resume", "RUN", "--set", "train.steps=2"),
    ("train", "--from", "RUN", "--set", "train.steps=2"),
    ("train", "runs-recipe.toml", "--set", "train.steps=1"),
    ("check", "runs-recipe.toml"),
    ("report", "RUN", "-o", "report.html"),
    ("runs", "verify", "RUN"),
)


@pytest.fixture
def run(project: Path) -> Path:
    """A run whose checkpoint and base model hold code that makes the file `mark`, and whose records turn it on."""
    run = run_dir(project)
    for config in (project / "model" / "config.json", *run.glob("checkpoints/*/hf/config.json")):
        auto = {"AutoConfig": "own_code.OwnConfig", "AutoModelForImageTextToText": "own_code.OwnModel"}
        value = json.loads(config.read_bytes()) | {"model_type": "own", "auto_map": auto}
        config.write_text(json.dumps(value))
        (config.parent / "own_code.py").write_text(CODE.format(mark=str(project / "mark")))
    for meta in run.glob("checkpoints/*/meta.json"):
        value = json.loads(meta.read_bytes())
        value["files"]["hf/own_code.py"] = {}
        meta.write_text(json.dumps(value))
    seal_checkpoints(run)
    resolved = json.loads((run / "resolved.json").read_bytes())
    resolved["recipe"]["model"]["trust_remote_code"] = True
    resolved["origins"]["model.trust_remote_code"] = "--set"
    (run / "resolved.json").write_text(json.dumps(resolved))
    (run / "recipe.toml").write_text(
        (project / "trained.toml").read_text().replace("[model]", "[model]\ntrust_remote_code = true")
    )
    return run


def test_no_command_runs_code_that_a_run_turns_on(run: Path, project: Path):
    names = {"checkpoint": next(run.glob("checkpoints/*")), "runs-recipe.toml": run / "recipe.toml"}
    for words in COMMANDS:
        done = ended(tuple(str(names.get(word, word)) for word in words), run)
        assert not (project / "mark").exists(), words
        if words[0] in ("eval", "generate", "train", "merge"):
            assert done.code == 2, (words, done)
            assert ("--trust-remote-code" if words[0] == "merge" else " ".join(CONSENT)) in done.err, (words, done.err)
    (loaded,) = load_recipe(run / "recipe.toml").warnings
    assert "is not used, because the recipe lies in a run" in loaded.message


def test_one_option_runs_the_code_and_a_resume_by_ones_own_recipe_needs_none(run: Path, project: Path):
    own = project / "own.toml"
    own.write_text((run / "recipe.toml").read_text())
    for words in (
        ("eval", "RUN", "--max-rows", "1", "--force", *CONSENT),
        ("merge", "RUN", "--out", "merged", "--trust-remote-code", "--skip-proof"),
        ("train", "own.toml", "--resume", "RUN", "--set", "train.steps=2"),
    ):
        done = this_process(*(str(run) if word == "RUN" else word for word in words), cwd=project)
        assert done.code == 0, (words, done.err)
    assert (project / "mark").exists()


def test_an_endpoint_s_model_needs_no_consent_and_a_printed_resume_repeats_the_users(run: Path, project: Path):
    with serve_endpoint(lambda number, body: failure(404)) as endpoint:
        words = ("--endpoint", endpoint.address, "--recipe", str(run), "--max-rows", "1")
        done = ended(("eval", *words, "--model", "m"), run)
    assert endpoint.requests and "404" in done.err and " ".join(CONSENT) not in done.err, done
    assert not (project / "mark").exists()
    request = TrainRequest("rl")
    assert " ".join(CONSENT) in resume_command(request, run)

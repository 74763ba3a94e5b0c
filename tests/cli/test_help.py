"""`--help` of every command: it works, has an example whose options exist, and loads nothing heavy.

Nor does a command whose names or options are wrong.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from typing import Any

import pytest
from readme_commands import all_commands, options_of

HEAVY = ("torch", "transformers", "datasets", "scipy", "sklearn", "numpy", "pyarrow", "rich", "PIL", "jinja2")
"""Not pydantic: Typer itself loads it where a command has options."""
COMMANDS = all_commands()
ALL_HELPS = """
import contextlib, io, json, sys
sys.argv = ["vlmrl"]
from vlmrl.cli.app import main
said = {}
for words in [[], *json.loads(sys.stdin.read())]:
    sys.argv = ["vlmrl", *words, "--help"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            main()
            code = 0
        except SystemExit as leave:
            code = leave.code or 0
    said[" ".join(words)] = [code, out.getvalue()]
print(json.dumps({"said": said, "modules": sorted(m for m in sys.modules if "." not in m)}))
"""


@pytest.fixture(scope="module")
def helps() -> dict[str, Any]:
    """Every help text from one fresh process, and what that process had loaded at its end."""
    asked = json.dumps([list(words) for words in COMMANDS])
    done = subprocess.run([sys.executable, "-c", ALL_HELPS], input=asked, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_help_loads_anything_heavy(helps: dict[str, Any]) -> None:
    assert not set(HEAVY) & set(helps["modules"])
    assert "typer" in helps["modules"]


def test_the_first_help_names_every_command(helps: dict[str, Any]) -> None:
    code, text = helps["said"][""]
    assert code == 0
    assert {words[0] for words in COMMANDS} <= set(re.findall(r"^  ([\w-]+)", text, flags=re.M))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(helps: dict[str, Any], words: tuple[str, ...]) -> None:
    code, text = helps["said"][" ".join(words)]
    assert code == 0
    assert f"Usage: vlmrl {' '.join(words)}" in text
    command = COMMANDS[words]
    assert "Example: vlmrl " in text, "no example in its help"
    undescribed = [o for p in command.params for o in p.opts if o.startswith("--") and not getattr(p, "help", "")]
    assert undescribed == [], "options without a word of help"


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_takes_json(words: tuple[str, ...]) -> None:
    assert "--json" in options_of(COMMANDS[words])


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_example_uses_options_that_exist(words: tuple[str, ...]) -> None:
    (line,) = re.findall(r"Example: (vlmrl .*)", COMMANDS[words].help or "")[:1]
    first = re.split(r"\s{2,}(?:or\b|\()", line)[0]
    typed = shlex.split(first)[1:]
    assert tuple(typed[: len(words)]) == words
    assert {t.split("=")[0] for t in typed if t.startswith("-")} <= options_of(COMMANDS[words])


WRONG = (
    "merge nope",
    "merge nope --dtype int8",
    "eval nope",
    "eval im --n 4",
    "generate nope --out x.jsonl",
    "generate im --out x.jsonl --n 4",
    "train nope",
    "train rows.parquet",
    "train --resume nope",
    "train --from nope@4",
    "sft nope",
    "try nope",
    "try digits_im --filter high --out x",
    "report nope",
    "check nope",
    "reward-check nope",
    "reward-check nope.jsonl",
    "compare nope nope",
    "compare nope,nope/test model nope",
    "merge step-000001 --out rows.parquet",
    "merge step-000001 --max-shard-size 5",
    "eval model --compare nope",
    "eval model --images blank --normal nope/test",
)
ALL_WRONG = """
import json, sys
sys.argv = ["vlmrl"]
from vlmrl.cli.app import main
for words in json.loads(sys.stdin.read()):
    sys.argv = ["vlmrl", *words]
    try:
        main()
        code = 0
    except SystemExit as leave:
        code = leave.code
    modules = [m for m in sys.modules if "." not in m or m == "vlmrl.tasks"]
    print(json.dumps([code, modules]), file=sys.stderr)
"""


def test_a_wrong_name_or_option_is_reported_before_anything_heavy_is_loaded(tmp_path):
    """Of modules, because no test measures time: `vlmrl.tasks` alone takes a second, torch with transformers four."""
    (tmp_path / "rows.parquet").write_bytes(b"PAR1\0\0")
    for path in ("step-000001/COMPLETE", "model/config.json"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text('{"model_type": "qwen2_5_vl"}')
    asked = json.dumps([words.split() for words in WRONG])
    command = [sys.executable, "-c", ALL_WRONG]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, cwd=tmp_path)
    ends = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("[")]
    assert [code for code, _ in ends] == [2] * len(WRONG), done.stderr
    heavy = {"vlmrl.tasks", *HEAVY} - {"rich"}
    loaded = {words: heavy & set(modules) for words, (_, modules) in zip(WRONG, ends, strict=True)}
    assert not any(loaded.values()), loaded

"""Every command that a screen prints as the next one runs, whatever the kind of the run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from command_line import this_process
from small_runs import recipe_text
from tinyworld import image

STEPS = "train = {steps = 2, tokens_per_row = 300}\n"
REWARD = 'reward.name = "exact_match"\n'
SHORT = "rollout = {prompts_per_step = 2, samples_per_prompt = 2, max_new_tokens = 4}\n"
KINDS = {
    "silent": ("sft", "", "validation = 0.25\n"),
    "scored": ("sft", REWARD + SHORT + 'eval = {every_steps = 1, metric = "reward"}\n', "validation = 0.25\n"),
    "lora": ("rl", REWARD + SHORT + "lora = {rank = 2}\n", ""),
}
"""Name of a run -> (kind, keys, keys of its data): one without a reward, one with both, one without validation."""
ADVICE = "next:|why:|use it:|make |create"
"""Words of the lines that advise a command."""


@pytest.fixture
def place(tmp_path: Path, tiny_folder: Path) -> Path:
    (tmp_path / "pictures").mkdir()
    for name, start in (("rows", 0), ("ROWS", 8)):
        rows = []
        for i in range(start, start + 8):
            image(i, 40, 56).save(tmp_path / "pictures" / f"{i}.png")
            rows.append({"question": f"say {i}", "answer": str(i), "response": f"it is {i}"})
            rows[-1] |= {"image": f"pictures/{i}.png"}
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, (kind, keys, data) in KINDS.items():
        text = recipe_text(tiny_folder, STEPS + keys, kind) + f'[[data]]\npath = "rows.jsonl"\n{data}'
        (tmp_path / f"{name}.toml").write_text(text)
    return tmp_path


def commands_in(*screens: str) -> list[str]:
    """Return the commands of lines that advise one: separated by spaces, `;` or the end of a bracket."""
    lines = [line for screen in screens for line in screen.splitlines() if re.search(ADVICE, line)]
    texts = [text for line in lines for text in re.findall(r"vlmrl (?:(?!   |; |\)\.|`).)+", line)]
    return [text for text in dict.fromkeys(texts) if "RECIPE" not in text]


@pytest.mark.slow
def test_the_next_commands_of_each_kind_of_run_end_without_an_error(place):
    screens = []
    for name, (kind, *_) in KINDS.items():
        done = this_process("sft" if kind == "sft" else "train", f"{name}.toml", "--name", name, cwd=place)
        assert done.code == 0, done.err
        screens += [done.err, this_process("runs", "diagnose", name, cwd=place).out]
        merged = this_process("merge", name, "--out", f"merged-{name}", "--skip-proof", cwd=place)
        screens += [merged.err]
    assert "evaluate both with one recipe" in this_process("compare", "silent", "silent", cwd=place).out
    for a, b in (("silent", "scored"), ("scored", "silent"), ("lora", "scored"), ("silent", "lora")):
        screens.append(this_process("compare", a, b, cwd=place).out)
    refused = this_process("eval", "lora", "--compare", "scored", cwd=place).err
    commands = commands_in(*screens, refused)
    assert "vlmrl eval silent --recipe scored" in commands
    assert not any(command in ("vlmrl eval silent", "vlmrl eval merged-silent") for command in commands)
    for command in commands:
        ended = this_process(*shlex.split(command)[1:], cwd=place)
        assert ended.code == 0, f"{command}\n{ended.err}"

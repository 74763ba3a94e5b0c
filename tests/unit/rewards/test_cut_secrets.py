"""A key that stands where a text is cut is hidden, wherever a text is cut: redaction comes first."""

from __future__ import annotations

import ast
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import vlmrl
from vlmrl.cli.output import shorten
from vlmrl.diagnose.thresholds import short
from vlmrl.recipe.files import read_layer
from vlmrl.recipe.validation_messages import show
from vlmrl.redaction.redact import excerpt, first_line, hide_known, redact_text, remember
from vlmrl.rewards.attempts import last_line
from vlmrl.services.protocol import error_words, failure_of
from vlmrl.services.rubric import read_judgement, read_rubric

KEY = "hf_Zx9Qm2Lp8Rt4Kw7Nb3Zx9Qm2Lp8Rt4Kw7Nb3"
OURS = "q7Zk2Lp9Rt4Kw7Nb3Xc5Vb8Nm1As6Df0"
RUBRIC = read_rubric({"instructions": "Compare.", "axes": [{"name": "form", "weight": 1, "describe": "?"}]}, "r.toml")


def raised(call: Callable[[], object]) -> str:
    with pytest.raises(Exception) as caught:
        call()
    return str(caught.value)


DOORS: dict[str, tuple[int, Callable[[str], str]]] = {
    "excerpt": (100, lambda text: excerpt(text, 100)),
    "excerpt with a mark": (100, lambda text: excerpt(text, 100, mark=" ...")),
    "first line of an error": (200, lambda text: first_line(ValueError(text))),
    "screen": (60, lambda text: shorten(text, 60)),
    "evidence of a diagnosis": (50, lambda text: short(text + "x " * 400, 100)),
    "message of an endpoint": (300, lambda text: error_words(text.encode(), lambda words: words)),
    "message of an endpoint in JSON": (300, lambda text: error_words(f'{{"error": "{text}"}}'.encode(), str)),
    "address of a redirect": (300, lambda text: str(failure_of(302, "x", where="w", hint="h", location=text))),
    "reason of a judgement": (2000, lambda text: read_judgement(RUBRIC, f'{{"reason": "{text}", "form": 1}}').reason),
    "axis of a judgement": (60, lambda text: raised(lambda: read_judgement(RUBRIC, f'{{"reason": "", "{text}": 1}}'))),
    "value of a rubric": (80, lambda text: raised(lambda: read_rubric({"instructions": {"a": text}}, "r.toml"))),
    "value of a recipe": (60, show),
    "service that is down": (500, lambda text: last_line("x\n" + text)),
}


def pieces(key: str) -> list[str]:
    return [key[start : start + 8] for start in range(3, len(key) - 7)]


@pytest.mark.parametrize("door", DOORS)
def test_no_piece_of_a_key_at_the_cut_is_left(door: str):
    most, call = DOORS[door]
    for before in range(most - len(KEY) - 30, most + 1):
        text = call("x " * (max(0, before) // 2) + "y" * (before % 2) + f" {KEY} and more words")
        assert not [piece for piece in pieces(KEY) if piece in text], before


def test_an_error_in_a_recipe_quotes_no_piece_of_a_key(tmp_path: Path):
    path = tmp_path / "r.toml"
    for before in range(40, 100, 7):
        path.write_text(f'{"x" * before} = oops # "{KEY}"\n')
        assert not [piece for piece in pieces(KEY) if piece in raised(lambda: read_layer(path))]


@pytest.mark.parametrize("end", [False, True])
@given(size=st.integers(8, len(OURS)))
def test_a_piece_of_a_key_of_ours_is_hidden_even_where_something_else_has_cut_it(end: bool, size: int):
    remember([OURS])
    piece = OURS[-size:] if end else OURS[:size]
    for hide in (redact_text, hide_known):
        assert hide(f"the service said: {piece} is wrong") == "the service said: <redacted> is wrong"


@pytest.mark.parametrize(("text", "most", "shown"), [("ab", 2, "ab"), ("abc", 2, "ab"), ("", 0, "")])
def test_a_text_without_secrets_is_only_cut(text: str, most: int, shown: str):
    assert excerpt(text, most) == shown
    assert excerpt(text, most, end=True) == text[len(text) - len(shown) :]


def test_the_mark_counts_and_stands_only_for_what_was_left_out():
    assert excerpt("a" * 10, 10, mark="...") == "a" * 10
    assert excerpt("a" * 11, 10, mark="...") == "a" * 7 + "..."
    assert excerpt("a" * 11, 10, mark="...", end=True) == "..." + "a" * 7


REWARD = """
    from vlmrl.types import RewardResult

    KEY = "hf_Zx9Qm2Lp8Rt4Kw7Nb3" + "Zx9Qm2Lp8Rt4Kw7Nb3"

    def reward(x):
        door, before = x.response.split()
        text = "x " * (int(before) // 2) + KEY + " and more words"
        if door == "note":
            return 0.5, text
        if door == "prints":
            print("x" * 9 + text[int(before) // 2 * 2:] + "y" * (4096 - 30))
            raise ValueError("see the output")
        if door == "name":
            raise type("E" + text, (ValueError,), {})("x")
        if door == "part":
            return {"a": "1" + text}
        raise ValueError(text)
"""
CUTS = {"note": 2000, "raise": 1000, "name": 400, "part": 80, "prints": 4096}


def test_no_piece_of_a_key_that_a_reward_says_is_left(scorer):
    from vlmrl.types import RewardInput

    rows = [RewardInput(f"{door} {most - left}", {}) for door, most in CUTS.items() for left in (4, 12, 26, 34)]
    for row, score in zip(rows, scorer(REWARD).score(rows), strict=True):
        said = f"{score.note} {score.error}"
        assert not [piece for piece in pieces(KEY) if piece in said], (row.response, said[-200:])


FAR = """
    KEY = "hf_Zx9Qm2Lp8Rt4Kw7Nb3" + "Zx9Qm2Lp8Rt4Kw7Nb3"
    LONG = "token=" + "q7Zk2Lp9Rt4Kw7Nb3Xc5Vb8Nm1As6Df0" * 30 + " "  # becomes short: what is far behind it gets near

    def reward(x):
        door, size = x.response.split()
        fill = LONG * (int(size) // len(LONG)) + "y " * 999
        if door == "prints":
            print(KEY + " " + (fill * 2)[:int(size) - 1], end="", flush=True)
            raise ValueError("see the output")
        text = fill[:int(size)] + KEY
        if door == "note":
            return 0.5, text
        raise ValueError(text)
"""


def test_no_piece_of_a_key_is_left_where_the_worker_cuts_before_the_parent_hides(scorer):
    from vlmrl.redaction.redact import CUT_MARGIN
    from vlmrl.rewards.worker import SENT_CHARS
    from vlmrl.types import RewardInput
    from vlmrl.workers.pool import KEPT_BYTES, OUTPUT_BYTES

    with scorer(FAR) as s:
        for door, left in product(("note", "raise"), (12, 14, 26)):
            (score,) = s.score([RewardInput(f"{door} {SENT_CHARS - left}")])
            said = f"{score.note} {score.error}"
            assert "<redacted>" in said and not [piece for piece in pieces(KEY) if piece in said], said
        for size in (KEPT_BYTES, OUTPUT_BYTES + CUT_MARGIN):
            said = raised(lambda size=size: s.score([RewardInput(f"prints {size - 20}")], strict=True))
            assert "it had printed" in said and not [piece for piece in pieces(KEY) if piece in said], said


def test_no_piece_of_a_key_that_is_no_frame_is_shown():
    from vlmrl.workers.frames import FrameBuffer

    buffer = FrameBuffer(bytes(16))
    buffer.feed(f"{'x' * 9} {KEY} and more".encode())
    said = raised(buffer.pop)
    assert "xxx <redacted> and" in said and not [piece for piece in pieces(KEY) if piece in said]


def test_no_code_cuts_the_text_of_an_error():
    """`str(error)[:100]`, `{error!s:.100}`: the cut would come before the redaction."""
    cut = []
    for path in Path(vlmrl.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            sliced = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) and node.value
            formatted = isinstance(node, ast.FormattedValue) and node.format_spec is not None and node.value
            value = sliced or formatted
            if isinstance(value, ast.Call) and ast.unparse(value.func) in ("str", "repr") and value.args:
                value = value.args[0]
            if isinstance(value, ast.Name) and value.id in ("error", "failure", "exception"):
                cut.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert cut == []

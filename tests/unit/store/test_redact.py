"""What a secret looks like is hidden, wherever it stands; what only looks like one stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from secret_texts import ASSIGNMENTS, HEX, INNOCENT, PARTS, PASSWORD, PEM, SECRETS, SERVICES, VALUE
from store_builders import make_group, make_run

from vlmrl.redaction import redact
from vlmrl.redaction.redact import (
    HIDDEN,
    hidden_keys,
    hide_known,
    learn,
    learn_argv,
    redact_result,
    redact_said,
    redact_text,
    redact_value,
)
from vlmrl.redaction.secrets import kind_of_name, looks_random, lowered
from vlmrl.store.runs import open_run

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def nothing_learned(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(redact, "_learned", frozenset())
    monkeypatch.setattr(redact, "_learned_passwords", frozenset())


def left_of(text: str) -> list[str]:
    return [part for part in PARTS if part in text]


@pytest.mark.parametrize("text", SECRETS)
def test_no_part_of_a_secret_is_left(text: str):
    found = redact_text(text)
    assert HIDDEN in found and left_of(found) == []
    assert found.count("\n") == text.count("\n"), "a line more or less would move every later line of a reward file"


def test_there_are_as_many_shapes_as_are_promised():
    assert len(set(SECRETS)) >= 80 and len(set(INNOCENT)) >= 70


@pytest.mark.parametrize("text", INNOCENT)
def test_what_only_looks_like_a_secret_stays(text: str):
    assert redact_text(text) == text


@pytest.mark.parametrize("text", SECRETS)
@pytest.mark.parametrize(("before", "after"), [("# ", ""), ("x = 1\n    ", "\ny = 2\n"), ("- ", ",")])
def test_a_secret_is_hidden_among_other_lines(text: str, before: str, after: str):
    whole = before + text.replace("\n", "\n" + before.rpartition("\n")[2]) + after
    assert left_of(redact_text(whole)) == []


def test_what_was_hidden_stays_as_it_is():
    whole = "\n".join([*SECRETS, *INNOCENT])
    assert redact_text(redact_text(whole)) == redact_text(whole)


@pytest.mark.slow
@given(st.lists(st.sampled_from([*SECRETS, *INNOCENT, "x", "'", '"', "(", "[", "\n", "=", ":", " ", "`"]), max_size=6))
def test_hiding_twice_is_hiding_once_whatever_stands_together(parts: list[str]):
    once = redact_text(" ".join(parts))
    assert redact_text(once) == once


@given(st.text(alphabet="ab1 \"'=:,[](){}<>\\\n`-_.;#@/", max_size=80), st.sampled_from(["key", "api_key", "password"]))
def test_any_text_is_looked_through(text: str, name: str):
    redact_text(name + text)
    redact_text(text + name + text)


def test_our_own_code_stays_as_it_is():
    """Ordinary Python, prompts and recipes."""
    folders = ("vlmrl/cli", "vlmrl/tasks", "vlmrl/rollout", "recipes")
    paths = [p for name in folders for p in (REPOSITORY / name).rglob("*") if p.suffix in (".py", ".jinja", ".toml")]
    assert len(paths) > 100
    assert [str(p) for p in paths if redact_text(p.read_text("utf-8")) != p.read_text("utf-8")] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "a" * 200_000 + " key" * 20_000 + "eyJ" * 50_000,
        "key=[" * 12_000,
        'api_key = "' * 5_000,
        "://a:" * 12_000,
        "-----BEGIN PRIVATE KEY-----" * 3_000,
        "password: " * 5_000,
        "key=('" * 6_000,
        "token='''" * 5_000,
        "AKIA" * 20_000,
        "<password>" * 5_000,
        "&token=" * 9_000,
        "sk-" * 20_000,
        "authorization: x " * 4_000,
        "mysql -" * 9_000,
        "password = x or " * 5_000,
        "key=a+" * 3_000,
        "login(" * 9_000,
        "name: x\n" * 9_000 + "value",
        "token=%s " * 9_000,
        "\n" * 60_000 + "password ",
        "cookie: a=" * 9_000,
        "password=a," * 9_000,
        "a/" * 20_000 + "@//",
        "docker login" * 6_000,
        "7z " * 20_000,
        "password " * 9_000,
        "x=" * 40_000,
        "key \\\n" * 9_000,
    ],
)
def test_the_time_is_linear_in_long_texts(text: str):
    """A quadratic search would take minutes, not a part of a second."""
    redact_text(text)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("OPENAI_API_KEY", "sure"),
        ("apiKey", "sure"),
        ("x-api-key", "sure"),
        ("clientSecret", "sure"),
        ("db_password2", "sure"),
        ("PASSWORD_PROD", "sure"),
        ("api_keys", "sure"),
        ("reward.args.api_key", "sure"),
        ("key", "maybe"),
        ("HF_TOKEN", "maybe"),
        ("login", "maybe"),
        ("API_KEY_OPENAI", "maybe"),
        ("auth", "maybe"),
        ("monkey", "none"),
        ("author", "none"),
        ("stop_token", "none"),
        ("cache_key", "none"),
        ("key_id", "none"),
        ("PGPASSWORD", "sure"),
        ("dbpass", "sure"),
        ("DB_PASS", "sure"),
        ("SMTP_PASSWD", "sure"),
        ("authtoken", "sure"),
        ("APITOKEN", "sure"),
        ("clientsecret", "sure"),
        ("masterkey", "sure"),
        ("client-key-data", "maybe"),
        ("githubtoken", "maybe"),
        ("sshkey", "maybe"),
        ("compass", "none"),
        ("bypass", "none"),
        ("padtoken", "none"),
        ("turkey", "none"),
        ("pass_at_k", "none"),
        ("tokenizer", "none"),
        ("dbpassword_hash", "none"),
        ("secret_name", "none"),
        ("max_new_tokens", "none"),
        ("tokens_per_row", "none"),
        ("keyboard", "none"),
    ],
)
def test_names_of_secrets_are_told_from_others(name: str, kind: str):
    assert kind_of_name(name) == kind


def test_drawn_characters_are_told_from_words_dates_and_versions():
    drawn = [VALUE, HEX, "a1b2c3d4e5f6g7", "s3cr3tvalue99", "550e8400-e29b-41d4-a716-446655440000"]
    others = [
        "Qwen2.5-VL-3B-Instruct",
        "step-000010-best",
        "20261122T093000Z",
        "digits_im_2024",
        "abcdefghijklmnop",
        "model-00001-of-00001.safetensors",
        "short1",
        "2026-11-22 09:30:00.123",
    ]
    assert [looks_random(text) for text in drawn + others] == [True] * len(drawn) + [False] * len(others)


def test_a_value_is_hidden_by_its_key_and_by_its_look():
    value = {"a": [{"api_key": "abc"}, SERVICES[0]], "tokens": 512, "note": f"see {SERVICES[1]}", "x": None}
    hidden = {"a": [{"api_key": HIDDEN}, HIDDEN], "tokens": 512, "note": f"see {HIDDEN}", "x": None}
    assert redact_value(value) == hidden
    assert hidden_keys(hidden) == ["a.0.api_key", "a.1", "note"]


ENVIRONMENT = {
    "X_API_KEY": "v4lue-of-x",
    "DB_URL": "postgres://me:pw-0f-db@h/x",
    "SHORT_TOKEN": "a1",
    "WORD_SECRET": "swordfish",
    "SSH_AUTH_SOCK": "/",
    "QUOTED_SECRET": 'q"uo\\te1',
    "OMP_NUM_THREADS": "12345678",
}
RIDDLE = 'The password is "swordfish", the key: it is not here'


def test_known_secrets_are_hidden_where_shapes_are_not_looked_for(monkeypatch: pytest.MonkeyPatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    text = f"v4lue-of-x pw-0f-db a1 / 12345678 {RIDDLE}"
    assert hide_known(text) == f"{HIDDEN} {HIDDEN} a1 / 12345678 {RIDDLE}"
    assert hide_known(json.dumps({"x": ENVIRONMENT["QUOTED_SECRET"]})) == json.dumps({"x": HIDDEN})
    assert hide_known(SECRETS[0]) == SECRETS[0], "nobody said that this one is ours"


def test_what_the_run_itself_holds_is_known_from_then_on():
    words = ("--set", f"reward.args.api_key={PASSWORD}-and-more", "--token", "t0ken-word", "x=https://u:p4ss-w0rd@h")
    text = f"{VALUE} {PASSWORD}-and-more t0ken-word p4ss-w0rd u"
    assert hide_known(text) == text
    learn([f'token = "{VALUE}"', RIDDLE, 'password = "swordfish"'])
    learn_argv(["vlmrl", *words])
    assert hide_known(text) == f"{HIDDEN} " * 4 + "u"
    assert hide_known(RIDDLE) == RIDDLE, "a word of a language is never hidden everywhere"


def test_a_word_that_is_a_password_of_an_address_is_hidden_in_addresses_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DB_URL", "postgres://me:otherword@h/x")
    text = "redis://:letters@cache/1 postgres://me:otherword@h/x letters and otherword: mail me@h"
    learn(["cache = redis://:letters@cache/0"])
    assert hide_known(text) == f"redis://:{HIDDEN}@cache/1 postgres://me:{HIDDEN}@h/x letters and otherword: mail me@h"


def test_what_is_said_on_the_terminal_loses_secrets_and_keeps_riddles(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SMTP_PASSWD", "Qq7-Zz9-Xx5")
    said = f"{RIDDLE} password = swordfish1 {SERVICES[0]} Qq7-Zz9-Xx5 https://u:{PASSWORD}@h"
    assert redact_said(said) == f"{RIDDLE} password = swordfish1 {HIDDEN} {HIDDEN} https://{HIDDEN}@h"
    result = {"text": "password = swordfish1", "note": "password = swordfish1", "n": [1.5, None, ("Qq7-Zz9-Xx5",)]}
    assert redact_result(result) == {
        "text": "password = swordfish1",
        "note": f"password = {HIDDEN}",
        "n": [1.5, None, [HIDDEN]],
    }


@given(st.text(max_size=40))
def test_lower_case_keeps_every_character_at_its_place(text: str):
    assert len(lowered(text + "\u0130")) == len(text) + 1


def test_rollouts_keep_their_texts_and_ids_and_lose_what_is_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from dataclasses import replace

    monkeypatch.setenv("JUDGE_API_KEY", VALUE)
    group = make_group(samples=2)
    riddle = 'password = "swordfish1"'  # a model's text: no secret of ours, and scored again as it is
    score = replace(group.samples[0].score, note=f"asked with {SERVICES[0]}", error=ASSIGNMENTS[0])
    samples = [replace(group.samples[0], text=f"{riddle} {VALUE}", score=score), replace(group.samples[1], text=riddle)]
    row = replace(group.row, columns={"hint": riddle, "leak": VALUE}, truth={"answer": riddle})
    run = make_run(tmp_path)
    path = run.write_rollouts(0, [replace(group, row=row, samples=tuple(samples), prompt_text=f"{riddle}? {VALUE}")])
    run.finish()
    (read,) = open_run(tmp_path, run.id).read_rollouts(0)
    assert [s.text for s in read.samples] == [f"{riddle} {HIDDEN}", riddle]
    assert read.prompt_text == f"{riddle}? {HIDDEN}"
    assert (read.row.truth, read.row.columns) == ({"answer": riddle}, {"hint": riddle, "leak": HIDDEN})
    said = read.samples[0].score
    assert (said.note, said.error) == (f"asked with {HIDDEN}", f'os.environ["X_API_KEY"] = "{HIDDEN}"')
    assert read.samples[0].trajectory == group.samples[0].trajectory
    assert left_of(json.dumps(pq.read_table(path).to_pylist(), default=str)) == []


def test_the_manifest_lets_nothing_through(tmp_path: Path):
    run = make_run(
        tmp_path,
        name="n",
        note=SERVICES[0],
        tags=[SERVICES[1]],
        argv=["vlmrl", "--token", VALUE],
        datasets=[{"name": "d", "path": SECRETS[len(SERVICES)]}],
        labels=[PEM],
        rewards=[{"source": "s", "args": {"judge": {"api_key": VALUE}}}],
    )
    run.event(0, "said", url=SERVICES[2])
    run.finish("failed", f"RuntimeError: {ASSIGNMENTS[0]}")
    for path in run.dir.rglob("*"):
        if path.is_file():
            assert left_of(path.read_text("utf-8", "replace")) == [], path


def test_commands_that_write_nothing_do_not_load_the_scanner():
    code = (
        "import sys, vlmrl.cli.app; assert 'vlmrl.redaction.redact' not in sys.modules; import vlmrl.store.runs;"
        "sys.exit('detect_secrets' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=os.environ).returncode == 0

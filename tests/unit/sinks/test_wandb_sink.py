"""What wandb is asked for, seen by a stand-in for its library: where to, under which id, and what without a network."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from vlmrl.loggers.base import Line, SinkRun
from vlmrl.loggers.builtin import SETTINGS, WandbSink


class Error(Exception):
    pass


class Wandb:
    """Keeps what `init` was asked for, and fails as often as it is told to."""

    Error = Error

    def __init__(self, failures: int = 0) -> None:
        self.asked: list[dict[str, Any]] = []
        self.failures = failures

    class Settings(SimpleNamespace):
        model_fields = dict.fromkeys((*SETTINGS, "init_timeout"))

    def init(self, **options: Any) -> Any:
        self.asked.append(options)
        if len(self.asked) <= self.failures:
            raise Error("no network\nand more")
        offline = options.get("mode") == "offline"
        return SimpleNamespace(
            entity="" if offline else "me",
            offline=offline,
            url=None if offline else "https://w/x",
            dir="/r/w/o/files",
            define_metric=lambda *a, **k: None,
            log=lambda *a, **k: None,
        )


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in ("WANDB_PROJECT", "WANDB_INIT_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_DATA_DIR", "kept")


def opened(monkeypatch, library: Wandb, **fields: Any) -> Any:
    monkeypatch.setitem(sys.modules, "wandb", library)
    return WandbSink().open(SinkRun("run-1", "mine", "/r", "rl", 1, 0, {"a": 1}, **fields))


def test_a_run_is_begun_under_its_own_id_and_found_again_by_it(monkeypatch):
    library = Wandb()
    kept = opened(monkeypatch, library, entity="team", group="g", tags=("t",), note="n")
    (asked,) = library.asked
    assert (asked["id"], asked["resume"], asked["name"], asked["project"]) == ("run-1", "allow", "mine", "vlmrl")
    assert (asked["entity"], asked["group"], asked["tags"], asked["notes"]) == ("team", "g", ["t"], "n")
    assert (asked["job_type"], asked["dir"], asked["config"]) == ("rl", "/r", {"a": 1})
    assert kept == {"id": "run-1", "project": "vlmrl", "entity": "me", "url": "https://w/x"}


def test_a_resume_goes_where_the_run_began_whatever_is_said_now(monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "elsewhere")
    library = Wandb()
    opened(monkeypatch, library, project="new", remembered={"id": "old-id", "project": "old", "entity": "us"})
    assert [library.asked[0][k] for k in ("id", "project", "entity")] == ["old-id", "old", "us"]


def test_the_recipe_names_the_project_then_the_environment(monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "elsewhere")
    library = Wandb()
    opened(monkeypatch, library, project="mine")
    opened(monkeypatch, library)
    assert [asked["project"] for asked in library.asked] == ["mine", "elsewhere"]


def test_nothing_that_may_hold_a_secret_is_gathered_and_a_wait_has_an_end(monkeypatch):
    library = Wandb()
    opened(monkeypatch, library)
    settings = vars(library.asked[0]["settings"])
    assert settings == {**SETTINGS, "init_timeout": 40.0}
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "7")
    opened(monkeypatch, library)
    assert "init_timeout" not in vars(library.asked[1]["settings"]), "a user's own limit holds"


def test_without_a_network_the_run_is_logged_offline_and_how_to_send_it_is_said(monkeypatch):
    library = Wandb(failures=1)
    kept = opened(monkeypatch, library)
    assert [asked.get("mode") for asked in library.asked] == [None, "offline"]
    assert kept["note"] == "offline (no network); send it later with: wandb sync /r/w/o"
    with pytest.raises(Error):
        opened(monkeypatch, Wandb(failures=2))


def test_wandbs_step_is_the_number_of_the_line(monkeypatch):
    sink, rows = WandbSink(), []
    sink._run = SimpleNamespace(log=lambda values, step: rows.append((values, step)))
    for number, step in enumerate((0, 1, 1)):
        sink.log(Line(step, 1 + number // 2, "train", 10 + number, {"x": number}))
    assert rows == [({"step": 0, "attempt": 1, "x": 0}, 10), ({"step": 1, "attempt": 1, "x": 1}, 11),
                    ({"step": 1, "attempt": 2, "x": 2}, 12)]  # fmt: skip

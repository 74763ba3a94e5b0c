"""A task of one's own: the file that gives it, what may be wrong with it, and who may have it run."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
from command_line import this_process

from vlmrl.data.open_dataset import open_dataset
from vlmrl.errors import DataError, RecipeError
from vlmrl.recipe.schema import Data, Reward
from vlmrl.reward_check.response_tables import TruthRule
from vlmrl.reward_check.scoring import TaskRef
from vlmrl.tasks import find_task, make_task, task_of
from vlmrl.tasks.dataset_assembly import Limits
from vlmrl.tasks.own_prep import prepare_own
from vlmrl.tasks.scaffold import write_task
from vlmrl.tasks.source import open_source

TASK = """
from pathlib import Path
from vlmrl import Attack, NewRow, Task

class Mark:
    pass

def task(info):
    return Task(
        name="any", summary="a sum", template="What is {{ a }} + 1?",
        validate=lambda truth: [] if "answer" in truth else ["none"],
        profiles={"default": (":score", {}), "near": ("reward.py:near", {"by": 2})}, prep=prep,
        attacks=lambda rows: [Attack("says 5", "five for every row", "guess", lambda x: "5")],
    )

def prep(rows: int = 6, start: int = 0):
    "Make sums."
    return {"train": (NewRow({"answer": start + i + 1}, columns={"a": start + i}) for i in range(rows))}

def score(x):
    return {"accuracy": float(x.response == str(x.truth["answer"]))}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a task file, which is the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "task.py").write_text(TASK)
    (tmp_path / "sums" / "reward.py").write_text("def near(x, by):\n    return 1.0\n")
    return tmp_path


def test_the_function_gives_the_task_and_its_rewards_are_found_beside_it(here: Path) -> None:
    task = make_task("sums/task.py:task", {})
    assert task.name == "sums/task.py:task" and task.summary == "a sum"
    assert task.profiles == {"default": ("sums/task.py:score", {}), "near": ("sums/reward.py:near", {"by": 2})}
    assert task.own is not None and task.own.text == TASK and task.own.path == "sums/task.py"
    found = TaskRef("sums/task.py:task", {}).make()
    assert found.validate({}) == ["none"]


def test_a_file_is_imported_once_a_content_and_its_classes_can_be_pickled(here: Path) -> None:
    mark = make_task("sums/task.py:task", {}).validate.__wrapped__.__globals__["Mark"]
    assert make_task(str(here / "sums" / "task.py") + ":task", {}).name.startswith("/")
    assert isinstance(pickle.loads(pickle.dumps(mark())), mark)
    (here / "sums" / "task.py").write_text(TASK.replace("a sum", "another sum"))
    assert make_task("sums/task.py:task", {}).summary == "another sum"


@pytest.mark.parametrize(
    ("name", "text", "message", "where"),
    [
        ("t.py:task", None, "cannot be read: No such file", ""),
        ("t.py", "", "does not name a function", ""),
        ("t.py:task", "def other(info): ...", "has no function `task`", "t.py"),
        ("t.py:task", "def task(info):\n    return {}", "returned dict, not a Task", "t.py:1"),
        ("t.py:task", "x = 1\ny = 1 / 0", "raised ZeroDivisionError: division by zero", "t.py:2"),
        ("t.py:task", "def task(info):\n    x = 1\n    return info['levels']", "raised KeyError: 'levels'", "t.py:3"),
        ("t.py:task", "def task(info)\n    pass", "is not valid Python", "t.py:1"),
        ("t.py:task", "raise SystemExit(0)", "raised SystemExit: 0", "t.py:1"),
        ("t.py:task", "def task(): ...", "raised TypeError", "t.py"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str | None, message: str, where: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "t.py").write_text(text)
    with pytest.raises(RecipeError) as error:
        make_task(name, {})
    assert message in error.value.message
    if where:
        assert error.value.where == where


def test_a_variant_is_refused(here: Path) -> None:
    with pytest.raises(RecipeError, match="unknown variant `im`"):
        make_task("sums/task.py:task", {}, "im")


def made(here: Path, **options: Any) -> Path:
    task = make_task("sums/task.py:task", {})
    return prepare_own(task, options, here / "data", Limits(workers=1)).path


@pytest.mark.slow
def test_prep_writes_checked_rows_and_a_source_opens_them(here: Path) -> None:
    path = made(here, rows=3, start=4)
    info = json.loads((path / "dataset.json").read_text())
    assert info["args"] == {"rows": 3, "start": 4} and info["task"] == "sums/task.py:task" and info["name"] == "data"
    source = open_source(Data(path=str(path), task="sums/task.py:task"), Reward())
    assert [row.truth["answer"] for row in source.rows] == [5, 6, 7]
    assert source.messages(source.rows[0])[0].content == "What is 4 + 1?"
    assert source.reward.name == "sums/task.py:score" and source.weights == {}
    assert open_source(Data(path=str(path), task="sums/task.py:task"), Reward(profile="near")).reward.args == {"by": 2}


def test_a_dataset_alone_runs_no_code(here: Path) -> None:
    path = made(here)
    (here / "sums" / "task.py").write_text("from pathlib import Path\nPath('ran').touch()\n" + TASK)
    with pytest.raises(RecipeError, match="data may run no code") as error:
        task_of(open_dataset(Data(path=str(path))))
    assert "--task sums/task.py:task" in str(error.value.hint) and not (here / "ran").exists()
    task_of(open_dataset(Data(path=str(path))), "sums/task.py:task")
    assert (here / "ran").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("NewRow({", "dict(**{"), "yielded dict, not a vlmrl.NewRow"),
        (('"answer": start', '"wrong": start'), "6 mistakes in the truths that `prep` made"),
        (("start + i + 1}", "1 / (3 - i)}"), "raised ZeroDivisionError"),
        (('"train": (', '"train": 7, "x": ('), "raised TypeError"),
        (('return {"train"', 'return [] and {"train"'), "returned list, not a mapping of split -> rows"),
        (("columns={", "images=[7], columns={"), "int is not an image"),
        (("columns={", "id='one', columns={"), "`one` is the id of two rows"),
        (("range(rows)", "range(0)"), "returned no row for the split `train`"),
        (("start + i + 1}", "start + i + 1, 'set': {1}}"), "cannot be stored as JSON"),
        (("start + i + 1}", "[i, 'two'][i % 2]}"), "the rows of the split `train` do not fit together"),
        (('if "answer" in truth', 'if truth["x"]'), "`validate` of `sums/task.py:task` raised KeyError: 'x'"),
        (("What is {{ a }}", "What is {{ b }}"), "the prompt template fails"),
    ],
)
def test_rows_that_cannot_be_used_are_named_and_nothing_is_written(
    here: Path, change: tuple[str, str], message: str
) -> None:
    file = here / "sums" / "task.py"
    assert change[0] in file.read_text()
    file.write_text(file.read_text().replace(*change))
    with pytest.raises((DataError, RecipeError)) as error:
        made(here)
    assert message in error.value.message and not (here / "data").exists()


def test_the_command_takes_the_options_of_prep(here: Path) -> None:
    done = this_process("prep", "sums/task.py:task", "--rows", 4, "--start", 2, "--json", cwd=here)
    found = json.loads(done.out)
    assert done.code == 0 and found["info"]["args"] == {"rows": 4, "start": 2} and found["path"].endswith("data/sums")
    again = this_process("prep", "sums/task.py:task", "--rows", 5, cwd=here)
    assert again.code == 2 and "rows was 4, now 5" in again.err
    assert "Make sums." in this_process("prep", "sums/task.py:task", "--help", cwd=here).out
    bad = this_process("prep", "sums/task.py:taks", cwd=here)
    assert bad.code == 2 and "has no function `taks`" in bad.err and "it defines: Mark, task, prep, score" in bad.err
    shown = this_process("data", "show", "data/sums", "--task", "sums/task.py:task", "-n", 1, cwd=here)
    assert shown.code == 0 and "What is 2 + 1?" in shown.out
    assert this_process("data", "show", "data/sums", cwd=here).code == 2


@pytest.mark.slow
def test_the_reward_of_a_table_is_the_tasks_and_its_tricks_are_tried(here: Path) -> None:
    rows = [{"response": str(said), "answer": n, "group": n} for n in (2, 5) for said in (2, 5)]
    (here / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = this_process("reward-check", "a.jsonl", "--task", "sums/task.py:task", "--probe", "--json", cwd=here)
    report = json.loads(done.out)
    assert report["rewards"]["a"]["name"] == "sums/task.py:score" and report["disagreements"]["accuracy"] == 0.5
    tried = {p["name"]: p for p in report["probes"]["a"]["probes"]}
    assert tried["says 5"]["mean"] == 0.5 and not tried["says 5"]["verdict"]  # right for one row of two, as any guess


def test_a_truth_form_of_ones_own_reads_texts_also_in_other_processes(here: Path) -> None:
    file = here / "sums" / "task.py"
    text = TASK.replace(
        "prep=prep,", "prep=prep, truths=TruthForm(('answer',), read=lambda t: {'answer': int(t[1:])}),"
    )
    file.write_text("from vlmrl.tasks.truth_kinds import TruthForm\n" + text)
    form = find_task("sums/task.py:task").truth_form({}, ())
    rule = TruthRule("sums/task.py:task", form)
    for one in (rule, pickle.loads(pickle.dumps(rule))):
        assert one.read("=7", {}) == ({"answer": 7, "ground_truth": "=7"}, "", "")
        assert one.read(None, {"answer": "8"})[0] == {"answer": "8"}


def test_a_recipe_that_names_a_wrong_file_is_wrong(here: Path) -> None:
    made(here)
    recipe = here / "r.toml"
    text = '[model]\npath = "org/m"\n[[data]]\npath = "data"\ntask = "sums/task.py:{}"\n'
    for function, code in (("task", 0), ("tisk", 2)):
        recipe.write_text(text.format(function))
        done = this_process("recipe", "check", "r.toml", cwd=here)
        assert done.code == code, done.out + done.err
    assert "has no function `tisk`" in done.out and "did you mean `task`?" in done.out


def test_the_written_task_folder_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [path.name for path in write_task(tmp_path / "squares", whole=True)] == [
        "prompt.jinja",
        "recipe.toml",
        "task.py",
        "test_squares.py",
    ]
    write_task(tmp_path / 'my "dots"', whole=True)
    text = (tmp_path / 'my "dots"' / "task.py").read_text("utf-8")
    assert run_path(str(tmp_path / 'my "dots"' / "task.py"))["task"]({}).name == 'my "dots"' and "@NAME@" not in text
    done = this_process("prep", "squares/task.py:task", "--out", "squares/data", "--rows", 8, "--json", cwd=tmp_path)
    assert done.code == 0 and json.loads(done.out)["info"]["splits"]["validation"]["rows"] == 8
    with pytest.raises(DataError, match="in vlmrl's style"):
        write_task(tmp_path / "other", style="trl", whole=True)


@pytest.mark.slow
def test_a_run_keeps_the_file_and_a_resume_sees_that_it_changed(here: Path) -> None:
    from types import SimpleNamespace

    from vlmrl.setup.run_records import changed_since, content_changes, records_of, texts_of

    data = Data(path=str(made(here)), task="sums/task.py:task")
    before = open_source(data, Reward())
    records = records_of([before])
    sha256 = records["datasets"][0]["task_sha256"]
    assert texts_of([before])["task", sha256] == TASK
    (here / "kept").mkdir()
    for what in ("task", "reward"):
        (here / "kept" / f"{what}-{sha256[:16]}.py").write_text(TASK)
    run: Any = SimpleNamespace(manifest=SimpleNamespace(**records), dir=here)
    (here / "sums" / "task.py").write_text(TASK.replace("i + 1", "i + 2").replace("says 5", "says five"))
    assert changed_since(run, [open_source(data, Reward())]) == []  # a run uses neither the attacks nor prep
    (here / "sums" / "task.py").write_text(TASK.replace("x.response ==", "x.response >="))
    after = open_source(data, Reward())
    changes = {change.what: change for change in content_changes(run, records_of([after]), texts_of([after]))}
    assert {"task sums/task.py:task", "reward sums/task.py:score"} == changes.keys()  # both are in the one file
    changed = changes["task sums/task.py:task"]
    assert changed.old == sha256 and after.task.own is not None and changed.new == after.task.own.sha256
    assert '+    return {"accuracy": float(x.response >= ' in changed.diff
    assert changes["reward sums/task.py:score"].diff == ""  # the same lines were shown
    assert content_changes(run, records, texts_of([before])) == []
    assert changed_since(run, [after]) == list(changes) and changed_since(run, [before]) == []


@pytest.mark.slow
def test_the_example_of_the_documentation_makes_data_and_pays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    page = (Path(__file__).parents[3] / "docs" / "tasks.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def task(info)" in block)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text(code)
    Image.new("RGB", (56, 56)).save("three.png")
    done = this_process("prep", "task.py:task", "--out", "data", "--rows", 3, "--json", cwd=tmp_path)
    assert done.code == 0 and json.loads(done.out)["info"]["splits"] == {"train": {"rows": 1}}, done.err
    (tmp_path / "a.jsonl").write_text('{"response": "<answer>3</answer>", "answer": 3}\n')
    checked = this_process("reward-check", "a.jsonl", "--task", "task.py:task", "--json", cwd=tmp_path)
    assert json.loads(checked.out)["parts"], checked.err


@pytest.mark.parametrize(
    "field",
    [
        "profiles=5",
        "profiles={'default': 5}",
        "profiles={'default': (':score',)}",
        "profiles={'default': (5, {})}",
        "profiles={'default': (':score', 5)}",
        "profiles={5: (':score', {})}",
        "outcome=None",
        "validate=None",
        "figures=None",
        "variables=5",
        "variables={1: 2}",
        "summary=None",
        "metrics={5: Metric('higher')}",
        "metrics={'a': Metric('higher', (0, 1, 2))}",
        "metrics={'a': Metric(range=('0', '1'))}",
        "truths=5",
        "kind=5",
        "template_file=5",
        "variants=5",
        "trace='x'",
    ],
)
def test_a_field_of_another_kind_is_named_when_the_task_is_made(here: Path, field: str) -> None:
    key = field.partition("=")[0]
    (here / "own.py").write_text(
        "from vlmrl import Metric, Task\n\ndef task(info):\n"
        f"    return Task(**{{'name': 'a', 'summary': 's', 'template': 'x', **dict({field})}})\n"
    )
    with pytest.raises(RecipeError, match=f"`{key}` of the task|`range` of a metric") as error:
        make_task("own.py:task", {})
    assert str(error.value.where).startswith("own.py:")


@pytest.mark.parametrize(
    ("function", "given", "told"),
    [
        ("validate", ({},), "not a list of texts"),
        ("attacks", ([],), "not a list of vlmrl.Attack"),
        ("trace", (None, None), "not the text of a response"),
        ("messages", (None,), "not a tuple of"),
    ],
)
def test_what_a_function_returns_is_checked_where_it_is_called(
    here: Path, function: str, given: Any, told: str
) -> None:
    (here / "own.py").write_text(
        f"from vlmrl import Task\n\ndef task(info):\n    return Task('a', 's', 'x', {function}=lambda *given: 5)\n"
    )
    with pytest.raises(RecipeError, match=f"`{function}` of `own.py:task`: .*{told}"):
        getattr(make_task("own.py:task", {}), function)(*given)


def test_an_error_without_a_text_is_named_by_its_kind(here: Path) -> None:
    (here / "own.py").write_text(
        "class Odd(Exception):\n    def __str__(self):\n        raise RuntimeError\n\n"
        "def task(info):\n    raise Odd()\n"
    )
    with pytest.raises(RecipeError, match=r"raised Odd: .its text cannot be made: RuntimeError"):
        make_task("own.py:task", {})


def prep_of(here: Path, function: str) -> None:
    """Write a task whose `prep` is this function; `rows(n)` makes rows."""
    (here / "own.py").write_text(
        "import sys\nfrom functools import partial\nfrom PIL import Image\nfrom vlmrl import NewRow, Task\n"
        "def rows(n):\n    return [NewRow({'answer': i}, columns={'a': i}) for i in range(n)]\n"
        f"{function}\ndef task(info):\n    return Task('a', 's', '{{{{ a }}}}', prep=prep)\n"
    )


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ("n: int | str = 3", "parameter `n` of `prep` cannot be an option"),
        ("n: Nowhere = 3", "name 'Nowhere' is not defined"),
        ("*n", "cannot be an option"),
        *((f"{name}: int = 3", f"the parameter `{name}`, which every") for name in ("force", "limits", "workers")),
    ],
)
def test_a_parameter_that_cannot_be_an_option_is_named(here: Path, parameters: str, told: str) -> None:
    prep_of(here, f"def prep({parameters}):\n    return {{'train': rows(2)}}")
    source = (here / "own.py").read_text()
    (here / "own.py").write_text("from __future__ import annotations\n" + source)
    done = this_process("prep", "own.py:task", "--out", "made", cwd=here)
    assert (done.code, (here / "made").exists()) == (2, False) and told in done.err, done.err


def test_a_function_without_a_signature_and_one_with_bound_arguments(here: Path) -> None:
    prep_of(here, "prep = dict")
    assert "cannot be read" in this_process("prep", "own.py:task", "--out", "made", cwd=here).err
    prep_of(here, "def full(n: int, more: int = 1):\n    return {'train': rows(n + more)}\nprep = partial(full, 2)")
    assert this_process("prep", "own.py:task", "--out", "made", "--more", 3, cwd=here).code == 0
    assert json.loads((here / "made" / "dataset.json").read_text())["splits"]["train"]["rows"] == 5


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ("{'../outside': rows(2)}", "calls a split '../outside'"),
        ("{'': rows(2)}", "calls a split ''"),
        ("{5: rows(2)}", "calls a split 5"),
        ("{'train': [NewRow({}, columns={'a': 1})]}", "an empty `truth`"),
        ("{'train': [NewRow({1: 2}, columns={'a': 1})]}", "not a mapping of names to values"),
        ("{'train': [NewRow(5, columns={'a': 1})]}", "`truth` of a row of `prep` is 5"),
        ("{'train': [NewRow({'answer': 1}, columns={'a': 1, 'truth': 2})]}", "the column `truth`"),
        ("{'train': [NewRow({'answer': 1}, columns={'a': 1, 'images': 2})]}", "the column `images`"),
        ("{'train': [NewRow({'answer': '\\ud800'}, columns={'a': 1})]}", "cannot be stored as JSON"),
        ("{'train': [NewRow({'answer': 1}, columns={'a': 1}, id='\\ud800')]}", "the `id` of a row"),
        ("{'train': [NewRow({'answer': 1}, columns={'a': 1}, id=5)]}", "the `id` of a row of `prep` is 5"),
        ("{'train': [NewRow({'answer': 1}, images=5, columns={'a': 1})]}", "`images` of a row of `prep` is 5"),
        ("{'train': [NewRow({'answer': 1}, images=[Image.new('L', (0, 9))], columns={'a': 1})]}", "cannot be read"),
    ],
)
def test_a_row_or_a_split_that_no_dataset_can_hold_is_named(here: Path, returned: str, told: str) -> None:
    prep_of(here, f"def prep():\n    return {returned}")
    done = this_process("prep", "own.py:task", "--out", "made/deep", cwd=here)
    assert (done.code, (here / "made" / "deep").exists()) == (2, False) and told in done.err, done.err
    assert not list(here.rglob("*.parquet"))


def test_an_option_that_no_json_can_hold_is_named(here: Path) -> None:
    prep_of(here, "def prep(share: float = 0.5):\n    return {'train': rows(2)}")
    done = this_process("prep", "own.py:task", "--out", "made", "--share", "nan", cwd=here)
    assert done.code == 2 and "the options of `prep` of `own.py:task` cannot be stored" in done.err

"""What of an observation is compared with the stored one; tests/e2e has the commands."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from PIL import Image

from vlmrl.data.images import image_hash
from vlmrl.environments.base import CUT_MARK
from vlmrl.environments.processes import Answer, Stopped
from vlmrl.recipe.schema import Environment
from vlmrl.reward_check.replay import _named, _values
from vlmrl.reward_check.scoring import TaskRef
from vlmrl.types import Media, Turn


def png(colour: str) -> bytes:
    sink = io.BytesIO()
    Image.new("RGB", (4, 2), colour).save(sink, "PNG")
    return sink.getvalue()


RED = png("red")
STORED = Turn("tool", "left right", (Media(image_hash(RED), 4, 2),))


@pytest.mark.parametrize(
    ("stored", "parts", "differs"),
    [
        (STORED, ["left ", RED, "right"], None),
        (STORED, ["left ", png("blue"), "right"], "pictures "),
        (STORED, ["left right"], "pictures"),
        (STORED, ["left ", RED, "wrong"], "left wrong"),
        (Turn("tool", f"begin{CUT_MARK}end"), ["begin and much more\nthan fits end"], None),
        (Turn("tool", f"begin{CUT_MARK}end"), ["begin and much more"], "begin and much more"),
        (
            Turn("tool", "error: the call cannot be read: no }\n1"),
            ["error: the call cannot be read: ", "\n", "1"],
            None,
        ),
        (Turn("tool", "error: the call cannot be read: no }\n1"), ["error: the call cannot be read: ", "\n", "2"], "2"),
        (Turn("tool", "key <redacted> end"), ["key sk-a b\nc end"], None),
        (Turn("tool", "key <redacted> end"), ["key sk-a other"], "other"),
        (Turn("tool", "x" * 500 + "a"), ["x" * 500 + "b"], "x" * 40 + "b"),
    ],
)
def test_texts_and_pictures_are_compared(stored, parts, differs):
    values = _values(stored, Answer(parts))
    assert (values is None) == (differs is None)
    assert values is None or (differs in values[1] and values[0] != values[1] and len(values[1]) < 70)


def test_an_environment_that_fails_is_a_difference_also_at_reset():
    assert _values(STORED, Stopped(False, "its process ended")) == ("left right", "failed: its process ended")
    nothing = Turn("user", "")
    assert _values(nothing, Stopped(False, "no")) == ("", "failed: no") and _values(nothing, Answer()) is None
    assert _values(nothing, Answer(["Look!"])) == ("", "Look!"), "reset shows something now"


class Asked:
    """Saved responses of a task, as the replay asks for its environment."""

    def __init__(self, task: str, task_ref: TaskRef | None) -> None:
        self.heads, self.ref = {"s": SimpleNamespace(task=task)}, task_ref

    def task_ref(self, source: str) -> TaskRef | None:
        return self.ref


def test_an_environment_in_the_file_of_a_task_is_found(tmp_path):
    one = Environment(name="tools.py:zoom", args={"x": 1})
    assert _named(Asked("table", None), "s", one) == ("tools.py:zoom", {"x": 1})
    built_in = Asked("crop", TaskRef("crop", {"name": "crop"}, "seen"))
    name, args = _named(built_in, "s", Environment(name=":Zoom", args={"least_side": 1}))
    assert name.endswith("tasks/crop/environment.py:Zoom") and args == {"space": "seen", "least_side": 1}
    file = tmp_path / "task.py"
    file.write_text("import vlmrl\ndef task(info):\n    return vlmrl.Task('t', 's', 'p')\n")
    own = Asked(f"{file}:task", TaskRef(f"{file}:task", {"name": "s"}))
    assert _named(own, "s", Environment(name=":mirror")) == (f"{file}:mirror", {})
    # The task's code has changed since the run: there is no task then, but its tools are run.
    assert _named(Asked("task.py:task", None), "s", Environment(name=":mirror")) == ("task.py:mirror", {})

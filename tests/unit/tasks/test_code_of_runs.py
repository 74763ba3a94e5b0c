"""Code in the folder of a run is never run: the run may be a stranger's."""

from pathlib import Path

import pytest

from vlmrl.errors import RecipeError, RewardError
from vlmrl.rewards import load_reward
from vlmrl.tasks import make_task


def test_code_in_the_folder_of_a_run_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path
    monkeypatch.chdir(here)
    run = here / "runs" / "a"
    (run / "kept").mkdir(parents=True)
    (run / "manifest.json").write_text("{}")
    (run / "metrics.jsonl").write_text("")
    (run / "kept" / "task.py").write_text(
        f"open({str(here / 'ran')!r}, 'w')\ndef score(x): return 1.0\ndef task(info): ..."
    )
    (here / "link.py").symlink_to(run / "kept" / "task.py")
    for name in ("runs/a/kept/task.py", "link.py"):
        with pytest.raises(RecipeError, match="lies in the run a: code there is never run"):
            make_task(f"{name}:task", {})
        with pytest.raises(RewardError, match="lies in the run a: code there is never run"):
            load_reward(f"{name}:score")
    assert not (here / "ran").exists()

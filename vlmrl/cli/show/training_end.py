"""Last lines of `vlmrl train` and `vlmrl sft`: status of the run, and the next commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vlmrl.cli.output import emit, say

if TYPE_CHECKING:
    from vlmrl.store.runs import Run


def show_end(done: Run, status: str, resume_command: str, as_json: bool) -> None:
    """Print how a run ended, also as JSON; for an interrupted run, the command that resumes it."""
    from vlmrl.dist.world import launched

    if as_json:
        emit(result_fields(done), as_json)
    if status != "interrupted":
        say(closing_lines(done))
        return
    say(f"saved {done.checkpoint_dirs()[-1].name}")
    if not launched():  # else the launcher prints the command, with the number of GPUs
        say(f"continue with: {resume_command}")


def closing_lines(done: Run) -> str:
    """Return the folder of a run, its best validation, its warnings, and the next commands.

    The commands have `--checkpoint last` if the best checkpoint does not exist.
    """
    from vlmrl.diagnose.run_facts import unbeaten_start
    from vlmrl.inference.eval_rows import only_training_rows
    from vlmrl.store.listing import checkpoint_option, command_line

    best, best_text, which = done.manifest.best, "", checkpoint_option(done)
    if best:
        best_text = f"; best {best.metric} {best.value:.4f} at step {best.step}"
        if which:
            best_text += ", the model it started from" if best.step == 0 else " (not kept)"
        if unbeaten_start(done):
            best_text += f"{', as at step 0' if best.step else ''}: no later validation was better than the start"
    # If there are no test or validation rows, eval would score training rows.
    rows = ("--split", "ROWS.jsonl") if only_training_rows(done.dir) else ()
    verbs = {"eval": (*which, *rows), "merge": which, "report": ()}
    verbs = verbs if done.manifest.rewards else {"merge": which, "report": ()}  # without a reward, eval scores nothing
    commands = [command_line((verb,), done.dir, done.manifest.name, *options) for verb, options in verbs.items()]
    missing = "\n      ROWS.jsonl: rows that training has not seen; the data has no test and no validation rows"
    end = f"{_outcome(done)}: {done.dir}{best_text}{_warnings(done)}"
    return f"{end}\nnext: {'   '.join(commands)}{missing if rows else ''}"


def _outcome(done: Run) -> str:
    from vlmrl.diagnose.run_facts import with_update

    train = done.metrics("train")
    if not train or with_update(train):
        return "done"
    return f"ended, but nothing was learned: none of the {len(train):,} steps updated the model"


def _warnings(done: Run) -> str:
    """Return the warnings about the run's metrics, as an addition to the line about its end; "" for none."""
    from vlmrl.diagnose.run_facts import with_update
    from vlmrl.diagnose.signs import find_signs, since
    from vlmrl.store.listing import command_line

    train = done.metrics("train")
    signs = find_signs(train, done.metrics("validation"))
    words = "; ".join(f"{sign.words}{since(sign)}" for sign in signs)
    why = command_line(("runs", "diagnose"), done.dir, done.manifest.name)
    return f"{f'  ! {words}' if signs else ''}\nwhy: {why}" if signs or not with_update(train) else ""


def result_fields(run: Run) -> dict[str, Any]:
    """Return the facts about a finished run for `--json`."""
    from vlmrl.diagnose.signs import find_signs

    best = run.manifest.best
    train = run.metrics("train")
    signs = find_signs(train, run.metrics("validation"))
    return {
        "run": run.id,
        "dir": str(run.dir),
        "status": run.status,
        "steps": len(train),
        "best": {"step": best.step, "metric": best.metric, "value": best.value} if best else None,
        "checkpoints": [p.name for p in run.checkpoint_dirs()],
        "last": train[-1] if train else None,
        "warnings": [{"name": s.name, "what": s.what, "step": s.step} for s in signs],
    }

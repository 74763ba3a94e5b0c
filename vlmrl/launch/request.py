"""Requests to train, evaluate or generate, made from the command line, and the command lines of the ranks for them.

A rank runs the same command without the launcher's own options (`Machines`). A field that is an option names its flag
once: the command's values and the words of a rank both come from it. No torch is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from vlmrl.errors import LaunchError, RecipeError

OptionValue = str | int | float | bool | Path | Sequence[str] | None


def option(flag: str, default: Any = None) -> Any:
    """Return a field of a request: the value of this option, which every rank gets."""
    return field(default=default, metadata={"flag": flag})


@dataclass(frozen=True)
class Machines:
    """Options of `vlmrl train` and `vlmrl sft` for GPUs and machines. Only the launcher reads them.

    Args:
        gpus: value of `--gpus`: a count of GPUs, or their numbers; None = this process trains alone.
        nnodes, node_rank: count of machines, and index of this one, from 0.
        endpoint: HOST:PORT of the machines' rendezvous; None for one machine.
        debug_rank: rank that may read from the terminal, for a debugger; None = no rank is debugged.
    """

    gpus: str | None = None
    nnodes: int = 1
    node_rank: int = 0
    endpoint: str | None = None
    debug_rank: int | None = None

    @property
    def words(self) -> list[str]:
        """These options as words of a command that resumes the run: without --debug-rank."""
        gpus = option_words({"--gpus": self.gpus})
        if self.nnodes == 1:
            return gpus
        place = {"--nnodes": self.nnodes, "--node-rank": self.node_rank, "--rdzv-endpoint": str(self.endpoint)}
        return [*gpus, *option_words(place)]


@dataclass(frozen=True)
class TrainRequest:
    """Arguments of `vlmrl train` or `vlmrl sft`.

    Args:
        kind: "rl" for `train`, "sft" for `sft`.
        recipe: recipe file; None, allowed with `resume` or `fork`, = the recipe of that run.
        overrides: `--set` values, each `key=value`.
        fork: run, or RUN@STEP, whose checkpoint a new run begins with.
        accept_changes: whether a resume may change recipe keys that affect what is learned.
        name, tags, note: labels of a new run.
        runs: folder of the runs as typed; None = the default.
        quiet: whether to print no line per step.
        as_json: whether to print one JSON object on stdout.
        dry_run: whether to only check and print the torchrun line.
        argv: words that the user typed after `vlmrl`, for the record of the run.
    """

    kind: Literal["rl", "sft"]
    recipe: Path | None = None
    overrides: tuple[str, ...] = option("--set", ())
    resume: str | None = option("--resume")
    fork: str | None = option("--from")
    accept_changes: bool = option("--accept-changes", False)
    name: str | None = option("--name")
    tags: tuple[str, ...] = option("--tag", ())
    note: str = option("--note", "")
    runs: Path | None = field(default=None, metadata={"flag": "--runs"})
    machines: Machines = field(default_factory=Machines)
    quiet: bool = option("--quiet", False)
    as_json: bool = option("--json", False)
    dry_run: bool = False
    argv: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        return "train" if self.kind == "rl" else "sft"

    @property
    def needs_launcher(self) -> bool:
        """Return whether the launcher is needed: for several processes, a choice of GPUs, or a dry run."""
        return self.machines.gpus is not None or self.machines.nnodes > 1 or self.dry_run

    def check(self) -> None:
        """Check that the options may be combined. Raises: RecipeError or LaunchError if not."""
        if self.recipe is None and self.resume is None and self.fork is None:
            raise RecipeError(
                "give a recipe, or --resume RUN, or --from RUN",
                hint=f"vlmrl {self.command} recipes/digits_im.toml   or   vlmrl {self.command} --resume last",
            )
        if self.resume is not None and self.fork is not None:
            raise RecipeError("--resume continues a run and --from begins a new one", hint="leave one of them out")
        if self.resume is not None and (self.name or self.tags or self.note):
            raise RecipeError(
                "--name, --tag and --note are for a new run: a resumed one keeps its own",
                hint=f"vlmrl runs note {self.resume} ...   or   vlmrl runs tag {self.resume} ...",
            )
        if self.accept_changes and self.resume is None:
            raise RecipeError(
                "--accept-changes needs --resume: a new run has no changes to accept", hint="leave it out"
            )
        self._check_debugging()

    def _check_debugging(self) -> None:
        """Raise a LaunchError if the rank to debug cannot use the terminal."""
        rank = self.machines.debug_rank
        if rank is None:
            return
        if self.as_json:
            raise LaunchError(
                "--debug-rank uses the terminal, and --json prints one JSON object there and nothing else",
                hint="leave one of them out",
            )
        if self.machines.nnodes > 1:
            raise LaunchError("--debug-rank works on one machine only", hint="leave out --nnodes")
        if self.machines.gpus is None and rank:
            raise LaunchError(
                f"--debug-rank {rank} does not exist: there is one process", hint="--debug-rank 0, or give --gpus N"
            )

    def rank_words(self) -> list[str]:
        """Return the words of every rank's command after `vlmrl`: this request without the launcher's options."""
        return command_words(self.command, None if self.recipe is None else str(self.recipe), options_of(self))

    def resume_words(self, run: str, root: Path) -> list[str]:
        """Return the words of every rank's command that resumes a run of this request, with the same output options.

        Args:
            run: id of the run.
            root: folder of the runs.
        """
        options = {"--resume": run, "--runs": root, "--quiet": self.quiet, "--json": self.as_json}
        return command_words(self.command, None, options)


@dataclass(frozen=True, kw_only=True)
class AnswerRequest:
    """Arguments that `vlmrl eval` and `vlmrl generate` share: which model answers which rows, and how.

    Fields that are not listed are the commands' options of the same name.

    Args:
        model: run, model folder, hub name, or name at an endpoint.
        temperature: sampling temperature; None = greedy.
        samples: responses per prompt.
        task: task of the rows instead of the recipe's; of `generate`, the task whose prompt images get.
        gpus: value of `--gpus`; None = this process alone answers.
        argv: words that the user typed after `vlmrl`, for the record.
    """

    model: str
    recipe: str | None = option("--recipe")
    data: str | None = option("--data")
    split: str | None = option("--split")
    source: str | None = option("--source")
    task: str | None = option("--task")
    checkpoint: str = option("--checkpoint", "best")
    temperature: float | None = option("--sample")
    samples: int = option("--n", 1)
    max_rows: int | None = option("--max-rows")
    seed: int = option("--seed", 0)
    overrides: tuple[str, ...] = option("--set", ())
    force: bool = option("--force", False)
    gpus: str | None = None
    runs: Path | None = field(default=None, metadata={"flag": "--runs"})
    argv: tuple[str, ...] = ()
    command: ClassVar[str]

    @property
    def has_images(self) -> bool:
        """Return whether images of the user's own are answered instead of rows."""
        return False

    def rank_words(self) -> list[str]:
        """Return the words of every rank's command after `vlmrl`: this request without --gpus."""
        return command_words(self.command, self.model, options_of(self))


@dataclass(frozen=True, kw_only=True)
class EvalRequest(AnswerRequest):
    """Arguments of `vlmrl eval`.

    Args:
        name: of the evaluation; None = composed of rows, checkpoint and sampling.
        compare: evaluation to compute the differences to.
        images: changes of the images, as typed.
        normal: normal evaluation to compare with; None = that of the run, else it is made.
        tools: change of the tools; None = they are as they are.
        settings: names of the recipe's settings to use; () = all.
        as_json: whether to print one JSON object on stdout.
    """

    name: str | None = option("--name")
    compare: str | None = option("--compare")
    images: str | None = option("--images")
    normal: str | None = option("--normal")
    tools: str | None = option("--tools")
    settings: tuple[str, ...] = option("--settings", ())
    as_json: bool = option("--json", False)
    command: ClassVar[str] = "eval"


@dataclass(frozen=True, kw_only=True)
class GenerateRequest(AnswerRequest):
    """Arguments of `vlmrl generate`.

    Args:
        out: file or folder to write.
        image_paths: images and folders of them that are answered instead of rows; () = rows are.
        prompt: text of their prompt.
        template: file with the template of their prompt.
    """

    out: Path = field(metadata={"flag": "--out"})
    image_paths: tuple[str, ...] = option("--images", ())
    prompt: str | None = option("--prompt")
    template: str | None = option("--template")
    command: ClassVar[str] = "generate"

    @property
    def has_images(self) -> bool:
        """Return whether images of the user's own are answered instead of rows."""
        return bool(self.image_paths)

    def check(self) -> None:
        """Raise a RecipeError if the options do not go together."""
        about_images = {"--task": self.task, "--prompt": self.prompt, "--template": self.template}
        about_rows = {"--data": self.data, "--split": self.split}
        refused = about_rows if self.image_paths else about_images
        given = [option for option, value in refused.items() if value is not None]
        if given and self.image_paths:
            raise RecipeError(f"--images and {given[0]} both say what to answer", hint="leave one of them out")
        if given:
            raise RecipeError(
                f"{given[0]} is for --images; dataset rows have their own prompts", hint="add --images, or leave it out"
            )


def options_of(request: TrainRequest | AnswerRequest) -> dict[str, OptionValue]:
    """Return flag -> value of the options that every rank gets; an empty text counts as none."""
    values = {one.metadata["flag"]: getattr(request, one.name) for one in fields(request) if "flag" in one.metadata}
    return {flag: None if value == "" else value for flag, value in values.items()}


def command_words(command: str, argument: str | None, options: Mapping[str, OptionValue]) -> list[str]:
    """Return the words of a command with at most one argument, and options; None and False are left out."""
    if argument is None:
        return [command, *option_words(options)]
    if argument.startswith("-"):  # before the `--` it would be parsed as an option
        return [command, *option_words(options), "--", argument]
    return [command, argument, *option_words(options)]


def option_words(options: Mapping[str, OptionValue]) -> list[str]:
    """Return options as words: True gives the bare option, a sequence repeats the option, None and False omit it."""
    words: list[str] = []
    for option, value in options.items():
        if value is None or value is False:
            continue
        if value is True:
            words.append(option)
        elif isinstance(value, (list, tuple)):
            words += [word for each in value for word in (option, each)]
        else:
            words += [option, str(value)]
    return words

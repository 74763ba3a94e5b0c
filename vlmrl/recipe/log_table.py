"""The recipe table `[log]`."""

from __future__ import annotations

from vlmrl.recipe.table import Count, PositiveInt, Table, Text


class Log(Table):
    """What is shown and where it is sent."""

    sample_every_steps: Count = 10
    """Print one sampled rollout, and send some with their images to the loggers, every so many steps; 0 = never."""
    keep_rollouts: PositiveInt | None = None
    """Newest steps whose rollouts are kept on the disk; those of older steps are deleted as the run goes. Left out =
    all."""
    keep_rollouts_every: Count = 0
    """With `keep_rollouts`: of older steps, every so many-th is kept too; 0 = none."""
    sinks: list[str] = []
    """Loggers besides metrics.jsonl, which is always written: "tensorboard", "wandb", "trackio", or a class of your own
    as `path/to/file.py:Class` (vlmrl/sinks/base.py says what it has to offer). Keys and tokens come from the
    environment alone."""
    project: Text | None = None
    """Project of wandb and trackio. Left out = WANDB_PROJECT for wandb, else "vlmrl"."""
    entity: Text | None = None
    """Team or user that owns the wandb project. Left out = WANDB_ENTITY, else your default there. trackio's Space is
    named by TRACKIO_SPACE_ID."""
    group: Text | None = None
    """Group of runs in wandb and trackio. Left out = the group of `--seeds` and `--grid`; none for a single run."""
    name: Text | None = None
    """Name of the run in wandb and trackio. Left out = the run's `--name`, else its id."""

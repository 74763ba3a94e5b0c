"""vlmrl: reinforcement learning of vision-language models, from a dataset to a model you can trust."""

from vlmrl.errors import RewardUnavailable
from vlmrl.types import RewardInput, RewardResult

__version__ = "0.1.0"
__all__ = ["RewardInput", "RewardResult", "RewardUnavailable", "__version__"]

"""The table of the seven domains of TaxonRL (arXiv:2603.04380); each one's facts are in its bundle."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from vlmrl.tasks.bird.task import BIRD
from vlmrl.tasks.chimp.task import CHIMP
from vlmrl.tasks.domain import Domain
from vlmrl.tasks.fungi.task import FUNGI
from vlmrl.tasks.gorilla.task import GORILLA
from vlmrl.tasks.human.task import HUMAN
from vlmrl.tasks.sea_star.task import SEA_STAR
from vlmrl.tasks.whale.task import WHALE

DOMAINS: Mapping[str, Domain] = MappingProxyType(
    {domain.name: domain for domain in (FUNGI, BIRD, SEA_STAR, CHIMP, GORILLA, HUMAN, WHALE)}
)
"""Domain by the name of its task."""

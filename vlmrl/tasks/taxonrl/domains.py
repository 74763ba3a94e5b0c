"""Table of the seven domains of TaxonRL (arXiv:2603.04380); each domain is defined in its own package."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from vlmrl.tasks.taxonrl.bird import BIRD
from vlmrl.tasks.taxonrl.chimp import CHIMP
from vlmrl.tasks.taxonrl.domain import Domain
from vlmrl.tasks.taxonrl.fungi import FUNGI
from vlmrl.tasks.taxonrl.gorilla import GORILLA
from vlmrl.tasks.taxonrl.human import HUMAN
from vlmrl.tasks.taxonrl.sea_star import SEA_STAR
from vlmrl.tasks.taxonrl.whale import WHALE

DOMAINS: Mapping[str, Domain] = MappingProxyType(
    {domain.name: domain for domain in (FUNGI, BIRD, SEA_STAR, CHIMP, GORILLA, HUMAN, WHALE)}
)
"""Name of a task -> its domain."""

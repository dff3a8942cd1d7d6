"""What an operator does around the runtime: weights, prices, checks, backups.

The command line asks here, so that it names no adapter itself. Like `app` this module knows them all.
"""

from __future__ import annotations

from postroom.models.catalog import Offer, Price, facts, offers, open_model, parse_model_ref
from postroom.models.weights import CATALOGUE, DEFAULT, Progress, install, installed, plan, remove
from postroom.stores.backup import BackUp, back_up, restore
from postroom.stores.check import Finding, check_sqlite
from postroom.stores.schema import VERSION

__all__ = [
    "CATALOGUE",
    "DEFAULT",
    "VERSION",
    "BackUp",
    "Finding",
    "Offer",
    "Price",
    "Progress",
    "back_up",
    "check_sqlite",
    "facts",
    "install",
    "installed",
    "offers",
    "open_model",
    "parse_model_ref",
    "plan",
    "remove",
    "restore",
]

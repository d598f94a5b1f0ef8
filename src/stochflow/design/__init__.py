"""From a laboratory's CSV to the next plate: campaigns of rounds, each with a surrogate, an acquisition and a diverse batch.

Names are resolved when they are first used, so that reading arguments does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stochflow.design.campaign import About as About
    from stochflow.design.campaign import Campaign as Campaign
    from stochflow.design.objectives import Column as Column
    from stochflow.design.settings import Ask as Ask
    from stochflow.design.settings import Noise as Noise

_HOMES = {"About": "campaign", "Ask": "settings", "Campaign": "campaign", "Column": "objectives", "Noise": "settings"}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

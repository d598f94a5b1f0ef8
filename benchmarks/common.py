"""What every benchmark here writes beside its figures."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch

import stochflow
from stochflow.law import metrics


def header(device: str, **settings: Any) -> dict[str, Any]:
    """Versions, hardware and settings."""
    cuda = device.startswith("cuda")
    return {
        "versions": {
            "stochflow": stochflow.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "hardware": torch.cuda.get_device_name()
        if cuda
        else f"{platform.machine()} CPU, {torch.get_num_threads()} thread(s)",
        "settings": settings,
    }


def spread(values: torch.Tensor) -> dict[str, Any]:
    """Median over seeds with its interval, and the seeds themselves."""
    found = metrics.interval(values.double())
    return {
        "median": found.median,
        "low": found.low,
        "high": found.high,
        "seeds": [round(v, 6) for v in values.double().cpu().tolist()],
    }


def write(result: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")

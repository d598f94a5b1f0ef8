"""Ray, started quietly: the cluster of RAY_ADDRESS where that is set, else one on this machine."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

from stochflow.errors import UserError


def start_ray(workers: int) -> Any:
    """The `ray` module, connected. A cluster that this process started ends with it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # else a local cluster leaves a token file in the home folder
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise UserError(
            "Ray is not installed: pip install 'stochflow[ray]', or leave `ray` out for processes"
        ) from error
    if ray.is_initialized():
        return ray
    address = os.environ.get("RAY_ADDRESS")
    own: dict[str, Any] = {"address": address} if address else {"num_cpus": workers, "include_dashboard": False}
    try:
        ray.init(logging_level=logging.ERROR, log_to_driver=False, **own)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = f"the cluster at RAY_ADDRESS={address}" if address else "a cluster on this machine"
        raise UserError(f"Ray cannot use {where}: {str(error).splitlines()[0]}") from error
    return ray


def stop_ray() -> None:
    """Leave the cluster; one that this process started ends."""
    with contextlib.suppress(ImportError):
        import ray

        ray.shutdown()

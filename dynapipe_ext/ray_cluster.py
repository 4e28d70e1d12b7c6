"""The Ray cluster that a command uses: a running one, or one of its own on this machine."""

from __future__ import annotations

from typing import Any

from dynapipe_ext.errors import ConfigError


def connect_to_ray(ray: Any, address: str | None, own: dict[str, Any] | None = None, **options: Any) -> None:
    """Connect this process to the cluster at `address`, or start one with the options `own` if that is None. A cluster
    of its own listens on loopback only: Ray would listen on all interfaces, and runs what it is sent.

    Errors: ConfigError if the address does not answer, or Ray does not start.
    """
    try:
        if address is not None:
            ray.init(address=address, logging_level="ERROR", **options)
            return
        from ray._private import ray_constants

        before = ray_constants.ENABLE_RAY_CLUSTER
        ray_constants.ENABLE_RAY_CLUSTER = False  # as on Windows and macOS; Ray replaces a loopback address it is given
        try:
            ray.init(include_dashboard=False, logging_level="ERROR", **(own or {}), **options)
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = before
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"Ray does not start at {address or 'this machine'} ({error}): check --ray-address") from None

"""Wait for machines that join a Ray cluster later: nodes that are still starting, or that an autoscaler adds."""

import time
from collections.abc import Callable

from cluster.actors import ActorSystem
from cluster.launch.calls import Deadline
from cluster.placement import demand_of, place
from cluster.spec.config import DeployConfig
from cluster.spec.errors import ConfigError

POLL_S = 1.0


def await_room(
    system: ActorSystem, config: DeployConfig, say: Callable[[str], None], check: Callable[[], None]
) -> None:
    """Return when the replicas fit on the machines that are there, within ``resources.start_timeout_s``.

    Args:
        system: the cluster to place them on.
        config: the replicas to place.
        say: called once with what is missing.
        check: called every second; what it raises ends the wait.

    Raises:
        ConfigError: there still is no room when the time is over.
    """
    deadline = Deadline(config.resources.start_timeout_s)
    try:
        place(config, system.machines())
        return
    except ConfigError as error:
        say(f"waiting for machines, {config.resources.start_timeout_s:g} s at most: {error}")
    with system.wanting(f"{config.name}-room", demand_of(config)) as is_there:
        while deadline.left_s() and not is_there(min(POLL_S, deadline.left_s())):
            check()
    while True:  # resources held for the demand become free a little later
        check()
        try:
            place(config, system.machines())
            return
        except ConfigError:
            if not deadline.left_s():
                raise
        time.sleep(min(POLL_S, deadline.left_s()))

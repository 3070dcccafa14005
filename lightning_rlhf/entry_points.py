"""What packages offer to a run, this one's extras among them: entry points of the group ``lightning_rlhf``.

The core names no extra. It asks here, by the name of what it needs:

====================== =================================================================================================
``agents``             class that runs conversations of agents, as :class:`~lightning_rlhf.extras.agents.loop.Agents`
``default_callback``   class of a callback that each run has, unless the trainer has one; a dot and a name may follow
``full_name``          function that returns the full name of a class by its short name, or None
``given_responses``    module for ``given_responses``, as :mod:`lightning_rlhf.extras.algorithms.given_rollouts`
``gpu_buffer``         module that pushes weights within a GPU, as :mod:`lightning_rlhf.extras.gpu_buffer.transfer`
``images``             module that reads images and processors, as :mod:`lightning_rlhf.extras.images`
``quantization``       module that stores layers in 4 or 8 bits, as :mod:`lightning_rlhf.extras.quantization`
``remote_checkpoints`` module that copies checkpoints to URLs, as :mod:`lightning_rlhf.extras.remote_checkpoints.copies`
``renderers``          class of the bridge ``renderers`` of an environment
``reward_warnings``    function of the reward functions and the data that returns warnings before a run
``router_replay``      module that records experts, as :mod:`lightning_rlhf.extras.router_replay.routers`
``run_lock``           module that locks the directory of a run, as :mod:`lightning_rlhf.extras.run_lock.lock`
``teacher_prompts``    module for ``teacher_prompt``, as :mod:`lightning_rlhf.extras.algorithms.teacher_prompts`
``tiled_mlp``          module that computes layers in pieces, as :mod:`lightning_rlhf.extras.tiled_mlp.tiling`
====================== =================================================================================================
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from lightning_rlhf.expected_errors import UsageError

GROUP = "lightning_rlhf"


def offered(name: str) -> list[Any]:
    """Return what the installed packages offer under a name, or under names that begin with it and a dot."""
    points = [point for point in entry_points(group=GROUP) if f"{point.name}.".startswith(f"{name}.")]
    return [point.load() for point in sorted(points, key=lambda point: point.name)]


def the_offered(name: str) -> Any:
    """Return the object that one installed package offers under a name.

    Raises:
        UsageError: no package offers one, or several do.
    """
    points = entry_points(group=GROUP, name=name)
    if len(points) != 1:
        packages = ", ".join(sorted(point.value for point in points)) or "none"
        raise UsageError(
            f"expected one entry point {name!r} of the group {GROUP!r}, got {packages}: install lightning-rlhf again, "
            f"because an editable installation finds new entry points only then"
        )
    (point,) = points
    return point.load()

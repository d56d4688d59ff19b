"""The reference policy of the KL term: frozen, sharded like the policy, and only there where it is used.

It is read from its folder at every start of a learner, a resumed one too, and written nowhere. Knows no loss.
"""

from __future__ import annotations

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.learner.health import broken_weight
from asyncrl.learner.shard import Policy, World, build_policy
from asyncrl.learner.table import all_max


def open_reference(config: Config, world: World) -> Policy | None:
    """The policy in algorithm.kl.reference (null: model.path), without gradients; None where algorithm.kl.coef is 0.

    It computes as the policy does (dtype, attention, compilation), on its own routes. A collective. Raises ConfigError
    naming the folder when it cannot be loaded, and on every rank when a weight of it is not finite on one.
    """
    kl = config.algorithm.kl
    if not kl.coef:
        return None
    path = kl.reference or config.model.path
    model = config.model.model_copy(update={"path": path})
    # Without a backward pass there is nothing to compute again.
    settings = config.learner.model_copy(update={"activation_checkpointing": False})
    try:
        reference = build_policy(model, settings, False, world)
    except ConfigError as exc:
        raise ConfigError(f"algorithm.kl.reference={path!r}: {exc}") from exc
    reference.requires_grad_(False)
    weight = broken_weight(reference)
    # A frozen weight does not heal: every update would be skipped.
    if any(all_max([bool(weight)], world)):
        raise ConfigError(
            f"algorithm.kl.reference={path!r} has a weight that is not finite ({weight or 'on another rank'}); "
            "set it to another folder, or copy the folder again"
        )
    return reference.eval()

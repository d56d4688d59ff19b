"""The forward over probes: groups that a generator in quarantine sampled, which are judged and never trained."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.config import Config
from asyncrl.learner.batch import rows_of
from asyncrl.learner.health import usable
from asyncrl.learner.mismatch_rows import mismatch_columns
from asyncrl.learner.score import plan, score
from asyncrl.learner.shard import Policy, World, reshard
from asyncrl.learner.table import Table, all_max, row_columns, row_names
from asyncrl.types import Group, ModelInfo


def score_probes(
    policy: Policy, groups: Sequence[Group], update: int, bound: int, config: Config, info: ModelInfo, world: World
) -> Table | None:
    """This rank's probes under the weights of now, scored as the batch is: drift and |log-ratio| of each response.

    Replay sends them to rank 0 alone, but every forward is a collective: the others make as many without a row. None
    where there is none on any rank. A collective.
    """
    if not all_max([len(groups)], world)[0]:
        return None
    rows, _ = usable(rows_of(groups, update, bound, info), info.top_k)
    budget = config.learner.micro_batch_tokens
    batches, _ = plan(rows, [True] * len(rows), info, budget, False, config.algorithm.routes == "r3", world)
    scores = score(policy, rows, batches, False, info, world)
    reshard(policy)
    columns = row_columns(rows) | mismatch_columns(rows, scores) | {"drift": scores.drift}
    return Table(row_names(rows), columns, 0, len(rows))

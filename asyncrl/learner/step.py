"""One optimizer step: backward over the scored micro-batches, clip, step or skip.

Knows nothing of queues, versions or metrics names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.learner.batch import MicroBatch, Row, collate, micro_batches, spread
from asyncrl.learner.health import check_step
from asyncrl.learner.objective import LossSums, Tokens, Totals, batch_loss
from asyncrl.learner.schedule import learning_rate
from asyncrl.learner.score import Scored, Scores
from asyncrl.learner.shard import Policy, World
from asyncrl.learner.table import all_max, all_sum
from asyncrl.sections.algorithm import AlgorithmSection
from asyncrl.sections.training import LearnerSection
from asyncrl.types import ModelInfo


@dataclass(frozen=True, slots=True)
class StepResult:
    """outcome: stepped, non_finite or filtered. grad_norm is before clipping, NaN when unknown.

    clipped counts the tokens outside the clip range. kl: the part of the loss that is the KL term, NaN where it has
    none. reason: of health.REASONS, "" for a step.
    """

    outcome: str
    grad_norm: float
    loss: float
    clipped: float
    lr: float
    reason: str = ""
    kl: float = math.nan


@dataclass(frozen=True, slots=True)
class RowValues:
    """What the scoring passes found, by row: CPU tensors [S_i] at the predicting positions.

    old_logp: pi_old. router_shift and ref_logp as in `objective.Tokens`, None where nobody asks.
    """

    old_logp: Sequence[Tensor]
    router_shift: Sequence[Tensor] | None = None
    ref_logp: Sequence[Tensor] | None = None


class Updater:
    """Owns the optimizer; `update` is one update of the policy."""

    def __init__(self, policy: Policy, settings: LearnerSection, algorithm: AlgorithmSection, world: World) -> None:
        self._policy = policy
        self._settings = settings
        self._algorithm = algorithm
        self._world = world
        # Fused: one call instead of a dozen for each parameter.
        self._optimizer = torch.optim.AdamW(
            policy.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )

    def update(
        self,
        update: int,
        rows: Sequence[Row],
        scores: Scores,
        values: RowValues,
        advantages: Tensor,
        keep: Tensor,
        totals: Totals,
        info: ModelInfo,
    ) -> StepResult:
        """Backward and step. advantages [n] and keep bool [n] are of this rank's rows.

        A non-finite gradient anywhere makes every rank skip the step. A collective.
        """
        if totals.tokens <= 0:
            return StepResult("filtered", 0.0, 0.0, 0.0, self._set_lr(update), "filtered")
        sums = self.backward(rows, scores, values, advantages, keep, totals, info)
        return self.apply(update, sums)

    def backward(
        self,
        rows: Sequence[Row],
        scores: Scores,
        values: RowValues,
        advantages: Tensor,
        keep: Tensor,
        totals: Totals,
        info: ModelInfo,
    ) -> LossSums:
        """Accumulate the gradient of the batch loss in the parameters; arguments as in `update`."""
        self._optimizer.zero_grad(set_to_none=True)
        sums = LossSums()
        for part in self._parts(rows, scores, advantages, keep, info):
            self._backward(part, values, advantages, keep, totals, sums)
        return sums

    def apply(self, update: int, sums: LossSums) -> StepResult:
        """Clip and step, or skip on every rank when anything is not finite."""
        lr = self._set_lr(update)
        norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters(), self._settings.max_grad_norm)
        grad_norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        loss, clipped, kl = all_sum(sums.vector(), self._world)
        # Both are global, so every rank takes the same branch.
        reason = "" if math.isfinite(grad_norm) else "gradient"
        reason = reason if math.isfinite(loss) else "loss"
        if not reason:
            self._optimizer.step()
            check_step(self._policy, update, self._world)
        self._optimizer.zero_grad(set_to_none=True)
        kl = kl if self._algorithm.kl_in_loss else math.nan
        return StepResult("non_finite" if reason else "stepped", grad_norm, loss, clipped, lr, reason, kl)

    def skip(self, update: int, reason: str) -> StepResult:
        """No backward and no step, for a reason of health.REASONS. No collective: every rank knows the reason."""
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult("non_finite", math.nan, math.nan, 0.0, self._set_lr(update), reason)

    def tune(self, settings: LearnerSection, algorithm: AlgorithmSection) -> None:
        """Go on with these settings; the optimizer keeps its moments."""
        self._settings, self._algorithm = settings, algorithm
        for group in self._optimizer.param_groups:
            group["weight_decay"] = settings.weight_decay

    def state(self) -> dict[str, Tensor]:
        """The optimizer's moments by name, as they are (writing to them is loading), and its step counts [P], a copy.

        A parameter that was never stepped gets the state that its first step would give it.
        """
        out: dict[str, Tensor] = {}
        steps = []
        for name, parameter in self._policy.named_parameters():
            state = self._optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            steps.append(state["step"].reshape(1).cpu())
            for moment in ("exp_avg", "exp_avg_sq"):
                out[f"optimizer.{moment}.{name}"] = state[moment].detach()
        out["optimizer.step"] = torch.cat(steps)
        return out

    def load_steps(self, steps_P: Tensor) -> None:
        """Go on counting there, parameters in the order of the policy."""
        for (_, parameter), step in zip(self._policy.named_parameters(), steps_P, strict=True):
            self._optimizer.state[parameter]["step"].fill_(float(step))

    def _set_lr(self, update: int) -> float:
        lr = learning_rate(update, self._settings)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _parts(
        self, rows: Sequence[Row], scores: Scores, advantages: Tensor, keep: Tensor, info: ModelInfo
    ) -> Sequence[Scored]:
        """The forwards to differentiate: those of the scoring pass, or new ones over what trains."""
        if scores.fused:
            return [p for p in scores.parts if p.batch.grad]
        # A KL term pulls on every token, whatever its advantage.
        pulled = [self._algorithm.kl_in_loss and row.trains for row in rows]
        wanted = [i for i, p in enumerate(pulled) if bool(keep[i]) and (p or float(advantages[i]) != 0.0)]
        sizes, budget = [r.size for r in rows], self._settings.micro_batch_tokens
        most = max(1, int(all_max([len(micro_batches(sizes, wanted, budget))], self._world)[0]))
        split = spread(sizes, wanted, budget, most)
        replay = any(p.batch.routes is not None for p in scores.parts)
        plain = [row.without_scores() for row in rows]
        return _Lazy(self._policy, [collate(plain, i, info, True, replay) for i in split], self._world)

    def _backward(
        self,
        part: Scored,
        values: RowValues,
        advantages: Tensor,
        keep: Tensor,
        totals: Totals,
        sums: LossSums,
    ) -> None:
        batch = part.batch
        index = list(batch.index)
        device = part.logp.device
        shift, ref = (None if v is None else part.padded(v) for v in (values.router_shift, values.ref_logp))
        adv = torch.zeros(len(batch.input_ids), dtype=torch.float32, device=device)
        mask = batch.predict_mask
        if index:
            adv = advantages[index].to(device, torch.float32)
            mask = mask & keep[index].to(device)[:, None]
        old = part.padded(values.old_logp)
        tokens = Tokens(part.logp, old, batch.rollout_logp, adv, mask, shift, ref)
        loss = batch_loss(tokens, self._algorithm, totals, sums)
        # FSDP averages gradients over ranks; the loss is a sum of shares, so undo the average.
        (loss * self._world.size).backward()


class _Lazy(Sequence[Scored]):
    """Runs each forward when it is asked for, so that one graph lives at a time."""

    def __init__(self, policy: Policy, batches: Sequence[MicroBatch], world: World) -> None:
        self._policy, self._batches, self._world = policy, batches, world

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, i: int) -> Scored:  # type: ignore[override]
        batch = self._batches[i].to(self._world.device)
        logp, entropy, _ = self._policy(batch)
        return Scored(batch, logp, entropy)


def row_logprobs(rows: Sequence[Row], scores: Scores) -> list[Tensor]:
    """Detached log-probs of every row at its predicting positions, [S_i] each, on the CPU."""
    return by_row(rows, scores, lambda part: part.logp) or []


def by_row(rows: Sequence[Row], scores: Scores, of: Callable[[Scored], Tensor | None]) -> list[Tensor] | None:
    """A [B, S] tensor of every forward, row by row [S_i], detached and on the CPU; None when a forward has none."""
    out: list[Tensor] = [torch.zeros(0)] * len(rows)
    for part in scores.parts:
        found = of(part)
        if found is None and part.batch.index:
            return None
        if found is None:
            continue
        values = found.detach().cpu()
        for j, i in enumerate(part.batch.index):
            out[i] = values[j, : rows[i].size]
    return out

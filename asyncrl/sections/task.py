"""What is trained on: prompts from users' files or made by procedures, how they are written, what scores them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from asyncrl.sections.base import SEED_MAX, Positive, Section

FUNCTION = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
"""`package.module:name`."""

Option = str | int | float | bool


class SourceSection(Section):
    """One source of prompts: a file of the user's, or a procedure that makes them. Exactly one of path and
    procedural."""

    name: str | None = Field(None, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=60)
    """Name of the source in metrics and logs; default: that of the file or of the procedure."""
    path: str | None = Field(None, min_length=1)
    """A .parquet, .jsonl, .json or .csv file, or a pattern with * for several of one layout (docs/data.md)."""
    procedural: str | None = Field(None, min_length=1)
    """A procedure: a dataset of reasoning-gym's that passed the gate, or zebra_grid (docs/procedural.md)."""
    options: dict[str, Option] = Field(default_factory=dict)
    """Options of the procedure, such as min_terms of chain_sum or size of zebra_grid."""
    size: Positive | None = None
    """Items: of a procedure (default 1000), or at most so many of a file, chosen by task.seed."""
    weight: float = Field(1.0, gt=0, le=1_000_000)
    """Share of this source in the training prompts, against the weights of the others; equal ones for equal shares."""
    prompt_key: str | None = Field(None, min_length=1)
    """Column with the prompt, where it is not found by itself; a.b is field b of column a."""
    answer_key: str | None = Field(None, min_length=1)
    """Column with the gold answer; a.b as above."""
    system_prompt: str | None = None
    """A system message before the question; replaces one in the file. Needs task.chat."""
    template: str | None = Field(None, min_length=1)
    """What the model is told: a text in which {question} stands for the question. Default: task.template, but a file
    whose prompts are whole instructions is left as it is."""
    verifier: str | None = Field(None, min_length=1)
    """What scores the responses (docs/verifiers.md); default: by the layout of the file, or of the procedure."""


class EvalSetSection(SourceSection):
    """One held-out set; weight means nothing here."""

    samples: int | None = Field(None, ge=0, le=1024)
    """Sampled responses per prompt; default: eval.samples. 0 with greedy for greedy ones alone."""
    greedy: bool | None = None
    """Also decode greedily; default: eval.greedy."""


class CurriculumSection(Section):
    """Prompts by how often they are solved, with kind=solve_rate."""

    kind: Literal["off", "solve_rate"] = "off"
    """solve_rate: a prompt whose newest group was solved less often than low, or more often than high, is given out
    only in every rest-th data epoch."""
    low: float = Field(0.0, ge=0, le=1)
    """Mean reward below or at which a prompt counts as too hard; 0: only when no response was right."""
    high: float = Field(1.0, ge=0, le=1)
    """Mean reward from which on a prompt counts as solved; 1: only when all responses were right."""
    rest: int = Field(4, ge=2, le=1024)
    """Data epochs of which such a prompt is given out in one."""


class TaskSection(Section):
    """chain_sum: sums and differences of reasoning-gym's chain_sum, for `make quickstart` with running totals, for
    language models in words (docs/smollm2.md). sources: users' files and procedures (docs/data.md)."""

    name: Literal["chain_sum", "sources"] = "chain_sum"
    """Where prompts come from."""
    train: tuple[SourceSection, ...] = Field((), max_length=64)
    """sources: what is trained on."""
    eval: tuple[EvalSetSection, ...] = Field((), max_length=32)
    """sources: held-out sets, each evaluated by itself; none may share a prompt with `train`."""
    max_prompt_tokens: int = Field(1024, ge=1, le=2**20)
    """sources: prompts with more tokens are left out, and counted."""
    min_terms: int = Field(2, ge=2, le=8)
    """chain_sum: fewest terms of a training expression."""
    max_terms: int = Field(5, ge=2, le=8)
    """chain_sum: most terms of a training and of an evaluation expression."""
    digits: int = Field(1, ge=1, le=3)
    """chain_sum: digits per term."""
    train_size: Positive = 8192
    """chain_sum: different training prompts; the cursor starts the next epoch after the last one."""
    eval_size: Positive = 400
    """chain_sum: held-out prompts; none equals a training expression."""
    eval_min_terms: int = Field(3, ge=2, le=8)
    """chain_sum: fewest terms of a held-out expression (there are only 200 of 2 terms with 1 digit)."""
    seed: int = Field(1, ge=0, le=SEED_MAX)
    """Seeds the items; train and evaluation items come from disjoint index ranges."""
    template: str = Field("{question}", min_length=1)
    """What the model is told: a text in which {question} stands for the question, such as `3+0=`."""
    chat: bool = False
    """Send that as a user's message in the chat template of the model folder."""
    system_prompt: str | None = None
    """A system message before the question. Needs chat."""
    answer: Literal["running_total", "last_integer"] = "running_total"
    """chain_sum: what is scored: the number after the last `#`, or the last integer of the response."""
    reward: str | None = Field(None, pattern=FUNCTION)
    """package.module:function that scores responses instead of the verifiers (docs/verifiers.md)."""
    environment: str | None = Field(None, pattern=FUNCTION)
    """package.module:Class of an environment: episodes of several turns (docs/environments.md)."""
    max_turns: int = Field(8, ge=1, le=1024)
    """environment: most responses of an episode."""
    curriculum: CurriculumSection = CurriculumSection()

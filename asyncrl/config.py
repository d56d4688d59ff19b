"""One YAML, one Config: sections, bounds and the rules between them. Sole user of OmegaConf.

`load_config` merges several files and `key=value` overrides from left to right and validates the
result. Loops take their section, leaves take plain values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import xxhash
from pydantic import BaseModel, ValidationError, model_validator

from asyncrl import rules, rules_engine
from asyncrl.errors import ConfigError
from asyncrl.sections.alarms import AlarmsSection
from asyncrl.sections.algorithm import AlgorithmSection
from asyncrl.sections.base import Section
from asyncrl.sections.fleet import (
    EvalSection,
    GeneratorSection,
    LoggingSection,
    ReplaySection,
    RunSection,
    WeightsSection,
)
from asyncrl.sections.policy import ModelSection, SamplingSection
from asyncrl.sections.sentinel import SentinelSection
from asyncrl.sections.task import TaskSection
from asyncrl.sections.training import LearnerSection, StalenessSection
from asyncrl.suggest import explain

SHOWN = 2000
"""Characters of a setting that roles tell each other: lists of sources may be longer than any message takes."""


class Config(Section):
    """A whole run, resolved."""

    run: RunSection = RunSection()
    model: ModelSection
    task: TaskSection = TaskSection()
    sampling: SamplingSection = SamplingSection()
    generator: GeneratorSection = GeneratorSection()
    replay: ReplaySection = ReplaySection()
    staleness: StalenessSection = StalenessSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    learner: LearnerSection = LearnerSection()
    weights: WeightsSection = WeightsSection()
    eval: EvalSection = EvalSection()
    sentinel: SentinelSection = SentinelSection()
    logging: LoggingSection = LoggingSection()
    alarms: AlarmsSection = AlarmsSection()

    @property
    def run_dir(self) -> Path:
        """Folder of this run."""
        return Path(self.run.dir) / self.run.name

    @property
    def responses_per_update(self) -> int:
        """n of one update when every group is whole."""
        return self.algorithm.groups_per_update * self.algorithm.group_size

    @property
    def full_routes(self) -> bool:
        """True when the generator must send routes and not only counts."""
        return self.algorithm.routes == "r3" or self.generator.routes == "full"

    @property
    def weights_security(self) -> Literal["loopback", "curve", "none"]:
        """Who may fetch weights: as replay's, unless set."""
        return self.weights.security or self.replay.security

    @property
    def weights_keys(self) -> str | None:
        """Key folder for the weights: replay's, unless set."""
        return self.weights.keys or self.replay.keys

    def shared_settings(self) -> dict[str, str]:
        """Values by key, as JSON, that all roles of a run must agree on: another value would corrupt the data.

        Prompts, rewards and responses are made by one role from them and read by another. Of a value that is longer
        than SHOWN there is the beginning and a hash.
        """
        a, s = self.algorithm, self.sampling
        values: dict[str, Any] = {f"task.{k}": v for k, v in self.task.model_dump(mode="json").items()}
        values |= {
            "run.seed": self.run.seed,
            "model.router_dtype": self.model.router_dtype,
            "sampling.temperature": s.temperature,
            "sampling.max_new_tokens": s.max_new_tokens,
            "algorithm.group_size": a.group_size,
            "algorithm.groups_per_update": a.groups_per_update,
            "algorithm.routes": a.routes,
            "algorithm.truncated": a.truncated,
            "algorithm.truncated_penalty": a.truncated_penalty,
            "algorithm.overlong_buffer": a.overlong_buffer,
            "staleness.sync_every": self.staleness.sync_every,
            "staleness.max_lag": self.staleness.max_lag,
            "staleness.updates_per_take": self.staleness.updates_per_take,
            "learner.updates": self.learner.updates,
        }
        return {key: _shown(json.dumps(value)) for key, value in values.items()}

    @model_validator(mode="after")
    def _cross_field_rules(self) -> Config:
        for problem in (*rules.problems(self), *rules_engine.problems(self)):
            raise ValueError(problem)
        return self


def _shown(text: str) -> str:
    if len(text) <= SHOWN:
        return text
    digest = xxhash.xxh3_64_hexdigest(text.encode())
    return f"{text[: SHOWN // 2]}... ({len(text)} characters with hash {digest})"


def load_config(paths: str | Path | Sequence[str | Path], overrides: Sequence[str] = ()) -> Config:
    """Merge YAML files and `key=value` overrides, left to right, and validate.

    Returns a frozen Config. Raises ConfigError that names the key, the value and the remedy.
    """
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    files = [paths] if isinstance(paths, str | Path) else list(paths)
    if not files:
        raise ConfigError("no config file given; pass one, for example configs/quickstart.yaml")
    try:
        merged = DictConfig({})
        for name, layer in [*((f"config file {str(f)!r}", _layer(f)) for f in files), *map(_override, overrides)]:
            try:
                if isinstance(layer, _Place):
                    layer.set(merged)
                else:
                    merged.merge_with(layer)
            except TypeError as exc:
                # OmegaConf's own for a section that meets a list.
                raise ConfigError(f"{name} puts a list where a section stands, or a section into a list") from exc
        tree = OmegaConf.to_container(merged, resolve=True)
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError, OSError) as exc:
        raise ConfigError(f"cannot read the config: {exc}") from exc
    if not isinstance(tree, dict):
        raise ConfigError(f"the config must be a mapping of sections, got {type(tree).__name__}")
    return validate({str(k): v for k, v in tree.items()})


def _layer(file: str | Path) -> Any:
    """One file as OmegaConf reads it."""
    from omegaconf import DictConfig, OmegaConf

    if not Path(file).is_file():
        hint = "; a setting is one word, key=value without blanks" if str(file) in known_keys() else ""
        raise ConfigError(f"config file {str(file)!r} does not exist{hint}")
    layer = OmegaConf.load(file)
    if not isinstance(layer, DictConfig):
        raise ConfigError(f"config file {str(file)!r} must be a mapping of sections")
    return layer


def _override(item: str) -> tuple[str, Any]:
    """One key=value, with its name for messages."""
    from omegaconf import OmegaConf

    key, sign, value = item.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"override {item!r} is not key=value")
    if re.search(r"\.\d+(?=\.|$)", key.strip()):
        place = re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", key.strip())
        raise ConfigError(f"override {item!r}: a place in a list is written in brackets; write '{place}={value}'")
    if re.search(r"\[\d+\]", key):
        return f"override {item!r}", _Place(key.strip(), OmegaConf.from_dotlist([f"value={value}"])["value"])
    return f"override {item!r}", OmegaConf.from_dotlist([item])


class _Place(NamedTuple):
    """A value for a place in a list, such as task.train[0].path."""

    key: str
    value: Any

    def set(self, tree: Any) -> None:
        """Put it there. Raises ConfigError when the list has no such place."""
        from omegaconf import OmegaConf

        entry = self.key[: self.key.index("]") + 1]
        try:
            found = OmegaConf.select(tree, entry)
        except (IndexError, TypeError, ValueError):
            found = None
        if found is None:
            raise ConfigError(f"override {self.key}: there is no {entry} in the config files; add it to one of them")
        OmegaConf.update(tree, self.key, self.value)


def read_overrides(items: Sequence[str]) -> dict[str, Any]:
    """Values by dotted key of `key=value` words, read as `load_config` reads them; nothing is checked.

    ConfigError for what is no key=value.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    out: dict[str, Any] = {}
    for item in items:
        try:
            layer = _override(item)[1]
            if isinstance(layer, _Place):
                out[layer.key] = layer.value
                continue
            tree = OmegaConf.to_container(layer, resolve=True)
        except (OmegaConfBaseException, YAMLError) as exc:
            raise ConfigError(f"cannot read {item!r}: {exc}") from exc
        out |= _values(tree)
    return out


def _values(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of a tree by dotted key."""
    if not isinstance(tree, dict) or not tree:
        return {prefix.removesuffix("."): tree}
    out: dict[str, Any] = {}
    for name, inner in tree.items():
        out |= _values(inner, f"{prefix}{name}.")
    return out


def validate(tree: dict[str, Any]) -> Config:
    """Validate a plain mapping. Raises ConfigError with one line per problem."""
    try:
        return Config.model_validate(tree)
    except ValidationError as exc:
        keys = known_keys()
        lines = [line for error in exc.errors() for line in explain(error, keys)]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from exc


def to_yaml(config: Config) -> str:
    """The resolved config as YAML; loading it gives an equal Config."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))


def save_config(config: Config, path: str | Path) -> None:
    """Write the resolved config as YAML; `load_config(path)` gives an equal Config."""
    Path(path).write_text(to_yaml(config))


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every dotted key of the config, sections included; a key of the sections in a list as `task.train[].path`."""
    keys: list[str] = []
    for name, info in model.model_fields.items():
        keys.append(prefix + name)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            keys += known_keys(info.annotation, f"{prefix}{name}.")
        elif (section := listed(info.annotation)) is not None:
            keys += known_keys(section, f"{prefix}{name}[].")
    return keys


def listed(annotation: Any) -> type[BaseModel] | None:
    """The section of which an annotation allows a list; None for any other."""
    inner = get_args(annotation)[:1] if get_origin(annotation) is tuple else ()
    return next((a for a in inner if isinstance(a, type) and issubclass(a, BaseModel)), None)

"""One YAML, one Config: sections, bounds and the rules between them. Sole user of OmegaConf.

`load_config` merges several files and `key=value` overrides from left to right and validates the
result. Loops take their section, leaves take plain values.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError, model_validator

from asyncrl.errors import ConfigError
from asyncrl.rules import problems
from asyncrl.sections.base import Section
from asyncrl.sections.fleet import (
    EvalSection,
    GeneratorSection,
    LoggingSection,
    ReplaySection,
    RunSection,
    WeightsSection,
)
from asyncrl.sections.policy import ChainSumTask, ModelSection, SamplingSection
from asyncrl.sections.training import AlgorithmSection, LearnerSection, StalenessSection
from asyncrl.suggest import explain


class Config(Section):
    """A whole run, resolved."""

    run: RunSection = RunSection()
    model: ModelSection
    task: ChainSumTask = ChainSumTask()
    sampling: SamplingSection = SamplingSection()
    generator: GeneratorSection = GeneratorSection()
    replay: ReplaySection = ReplaySection()
    staleness: StalenessSection = StalenessSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    learner: LearnerSection = LearnerSection()
    weights: WeightsSection = WeightsSection()
    eval: EvalSection = EvalSection()
    logging: LoggingSection = LoggingSection()

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
        return self.algorithm.routes == "r3"

    @model_validator(mode="after")
    def _cross_field_rules(self) -> Config:
        for problem in problems(self):
            raise ValueError(problem)
        return self


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
        layers = []
        for file in files:
            if not Path(file).is_file():
                raise ConfigError(f"config file {str(file)!r} does not exist")
            layers.append(OmegaConf.load(file))
            if not isinstance(layers[-1], DictConfig):
                raise ConfigError(f"config file {str(file)!r} must be a mapping of sections")
        for item in overrides:
            if not item.partition("=")[1] or not item.partition("=")[0].strip():
                raise ConfigError(f"override {item!r} is not key=value")
        layers.append(OmegaConf.from_dotlist(list(overrides)))
        tree = OmegaConf.to_container(OmegaConf.merge(*layers), resolve=True)
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError, OSError) as exc:
        raise ConfigError(f"cannot read the config: {exc}") from exc
    if not isinstance(tree, dict):
        raise ConfigError(f"the config must be a mapping of sections, got {type(tree).__name__}")
    return validate({str(k): v for k, v in tree.items()})


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
    """Every dotted key of the config, sections included."""
    keys: list[str] = []
    for name, info in model.model_fields.items():
        keys.append(prefix + name)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            keys += known_keys(info.annotation, f"{prefix}{name}.")
    return keys

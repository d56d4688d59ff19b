"""The commands. A role's code is imported only when that role runs."""

from __future__ import annotations

import logging
import os
import socket
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from asyncrl import rules_algorithm
from asyncrl.config import Config, load_config, save_config, to_yaml, validate
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.evaluate import command as evaluation
from asyncrl.lens import command as lens
from asyncrl.samples import command as samples
from asyncrl.watch import commands

log = logging.getLogger(__name__)

HELP = "Asynchronous RL for Mixture-of-Experts policies. Try: asyncrl run configs/quickstart.yaml"

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help=HELP, pretty_exceptions_enable=False, rich_markup_mode=None
)

keys = typer.Typer(no_args_is_help=True, help="Make keys for replay.security=curve; allow and revoke clients.")
app.add_typer(keys, name="keys")

Arguments = Annotated[
    list[str],
    typer.Argument(metavar="CONFIG... [KEY=VALUE...]", help="YAML files, merged left to right, and overrides."),
]

Dtype = Literal["float32", "bfloat16", "float16"]


def read(arguments: list[str]) -> Config:
    """Split arguments into files and key=value overrides and load them."""
    return load_config([a for a in arguments if "=" not in a], [a for a in arguments if "=" in a])


def _role(name: str) -> None:
    from asyncrl.parent import die_with_parent

    # A child of `asyncrl run` or of torchrun must not outlive it; a role in a user's shell may.
    if os.environ.get("ASYNCRL_SUPERVISED") == "1" or "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    # One line per HTTP-like request of a library is noise in a role's log.
    logging.getLogger("absl").setLevel(logging.WARNING)


def _warn(config: Config) -> None:
    """What is unusual about the method; by whoever starts the learner, so once in a run."""
    for note in rules_algorithm.notes(config):
        log.warning("%s", note)


def _prepare(config: Config, weights: bool = True, generates: bool = False) -> Path:
    """Checks that need the model folder, then the run folder with the resolved config.

    weights: whether this role loads the model's weights; replay reads its config and tokenizer only, and is the one
    that reads the files of the task. generates: whether it is a generator.
    """
    from asyncrl.preflight import preflight

    preflight(config, weights, generates, data=not weights)
    run_dir = config.run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    if not (run_dir / "config.yaml").exists():
        save_config(config, run_dir / "config.yaml")
    return run_dir


@app.command()
def run(
    arguments: Arguments,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run of this name, or RUN/config.yaml, where it ended.")
    ] = False,
) -> None:
    """Start and supervise all roles on this machine."""
    from asyncrl.resume import located
    from asyncrl.supervisor import run as supervise

    config = read(arguments)
    if resume:
        config = located(config, [a for a in arguments if "=" not in a])
    _warn(config)
    raise typer.Exit(supervise(config, resume, [a for a in arguments if "=" in a]))


@app.command()
def replay(arguments: Arguments) -> None:
    """Start the queue."""
    from asyncrl.replay.server import run as serve

    config = read(arguments)
    _role("replay")
    serve(config, _prepare(config, weights=False))


@app.command()
def generate(
    arguments: Arguments,
    id: Annotated[str, typer.Option(help="Name of this generator, unique in the run; default HOST-PID.")] = "",
) -> None:
    """Start one generator."""
    from asyncrl.process import ensure_environment

    config = read(arguments)
    ensure_environment(config.generator.threads)
    from asyncrl.weights.collective.messages import ENGINE

    id = id or f"{socket.gethostname()[:80]}-{os.getpid()}"
    if not ENGINE.fullmatch(id):
        raise ConfigError(
            f"--id {id!r}: a name has 1 to 100 letters, digits, '.', '_' and '-', and no '.' or '-' first"
        )
    _role(id)
    run_dir = _prepare(config, generates=True)
    from asyncrl.generator.role import run as sample

    sample(config, run_dir, id)


@app.command()
def learn(arguments: Arguments) -> None:
    """Start the learner: all its ranks, or one rank when torchrun calls this."""
    from asyncrl.process import ensure_environment

    config = read(arguments)
    ensure_environment(config.learner.threads)
    if "RANK" not in os.environ:
        _warn(config)
        # Alone, it is its own torchrun with learner.ranks ranks.
        from asyncrl.launcher import STANDALONE

        ranks = [*STANDALONE, "--nproc-per-node", str(config.learner.ranks)]
        command = [sys.executable, "-m", "asyncrl.launcher", *ranks, "-m", "asyncrl", "learn", *arguments]
        os.execv(sys.executable, command)
    _role(f"learner-{os.environ['RANK']}")
    run_dir = _prepare(config)
    from asyncrl.learner.loop import run as train

    train(config, run_dir)


@app.command()
def config(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[CONFIG... [KEY=VALUE...]]", help="As for run.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Say what is known of a model folder, without any config.")
    ] = None,
    device_memory: Annotated[
        float | None, typer.Option(metavar="GIB", min=0.1, help="Memory of a GPU to fit; default: what is here.")
    ] = None,
) -> None:
    """Check a config against its model and print it resolved, with what the model is and how much memory it takes."""
    from asyncrl.models.summary import summary
    from asyncrl.preflight import preflight
    from asyncrl.tasks import longest_prompt

    if (model is None) == (not arguments):
        raise ConfigError("asyncrl config takes either CONFIG files or --model PATH")
    if model is not None:
        for field, text in summary(model).items():
            print(f"{field}: {text}")
        for line in _memory(validate({"model": {"path": str(model)}}), 0, device_memory):
            print(line)
        return
    resolved = read(arguments or [])
    _warn(resolved)
    preflight(resolved)
    print(to_yaml(resolved), end="")
    for field, text in summary(resolved.model.path).items():
        print(f"# {field}: {text}")
    for line in _memory(resolved, longest_prompt(resolved.task, resolved.model.path), device_memory):
        print(f"# {line}")


def _memory(config: Config, longest_prompt: int, device_gib: float | None) -> list[str]:
    """What the memory estimate says; a config.json that leaves out what it needs is no reason to refuse the config."""
    from asyncrl.learner.footprint import report

    try:
        return report(config, longest_prompt, device_gib)
    except ConfigError as exc:
        return [f"memory: {exc}"]


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    step: Annotated[
        str, typer.Argument(metavar="STEP", help="Number of an update that has a checkpoint; last; final; or best.")
    ],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write.")],
    dtype: Annotated[
        Dtype | None, typer.Option(help="Dtype of the weights; default: as the start model stores each.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Where the start model lies now; default: model.path of the run.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a model folder of that name.")] = False,
) -> None:
    """Write the policy of a run at a step as a Hugging Face folder."""
    from asyncrl.process import ensure_environment

    ensure_environment(1)
    from asyncrl.learner.export import export_step

    size = export_step(run_dir, step, directory, dtype, model, force)
    print(f"{directory}: {size / 1e9:.3g} GB of weights")


KeyFolder = Annotated[Path, typer.Argument(metavar="DIR", help="The key folder: replay.keys.")]


@keys.command("new")
def keys_new(
    directory: KeyFolder,
    client: Annotated[
        list[str] | None, typer.Option(help="Name of a client; may be given several times; default: client.")
    ] = None,
    server: Annotated[
        Path | None, typer.Option(help="A server.pub: make a client's folder that pins this server.")
    ] = None,
) -> None:
    """Make a server key pair, unless there is one, and a key pair for each client. Overwrites nothing."""
    from asyncrl.transport.keys import new

    for file in new(directory, client or (), server):
        print(file)


@keys.command("add")
def keys_add(
    directory: KeyFolder,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The client's public key, NAME.pub.")],
    name: Annotated[str | None, typer.Option(help="Name on the allow-list; default: that of the file.")] = None,
) -> None:
    """Allow a client whose key was made elsewhere. A running replay notices."""
    from asyncrl.transport.keys import add

    print(add(directory, file, name))


@keys.command("list")
def keys_list(directory: KeyFolder) -> None:
    """Print the name and public key of every allowed client."""
    from asyncrl.transport.keys import listed

    for name, public in listed(directory):
        print(f"{public.decode()}  {name}")


@keys.command("revoke")
def keys_revoke(
    directory: KeyFolder, name: Annotated[str, typer.Argument(metavar="NAME", help="Name on the allow-list.")]
) -> None:
    """Take a client off the allow-list. A running replay ends its connection."""
    from asyncrl.transport.keys import revoke

    revoke(directory, name)


commands.register(app)
lens.register(app)
samples.register(app)
evaluation.register(app)


def main() -> None:
    """Entry point: errors of the exception tree become one message and a status."""
    from asyncrl.process import end

    status = 0
    try:
        app()
    except SystemExit as exc:  # every command ends with one
        if isinstance(exc.code, str):
            print(exc.code, file=sys.stderr)
        status = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except ConfigError as exc:
        print(f"config error: {exc}", file=sys.stderr)
        status = 2
    except AsyncRLError as exc:
        logging.getLogger("asyncrl").error("%s: %s", type(exc).__name__, exc)
        status = 1
    end(status)

"""torchrun that dies with its parent: `python -m asyncrl.launcher TORCHRUN_ARGUMENTS`."""

from __future__ import annotations

from asyncrl.process import die_with_parent


def main() -> None:
    """Tie this process to its parent, then hand over to torchrun."""
    from torch.distributed.run import main as torchrun

    die_with_parent()
    torchrun()


if __name__ == "__main__":
    main()

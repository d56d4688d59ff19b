"""The process group of one sender (rank 0) and the processes of one engine, made as SGLang makes its side.

torch has no public way to make a group beside the default one with a store of its own, so this leans on a private
helper of torch.distributed; here and nowhere else.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from asyncrl.errors import ConfigError, WeightSyncError

try:
    from torch.distributed.distributed_c10d import _new_process_group_helper
except ImportError:  # told by check()
    _new_process_group_helper = None  # type: ignore[assignment]

_HELP = "use the torch of constraints.txt, or weights.carrier=disk"


def check(backend: str) -> None:
    """ConfigError when no group of that backend can be made by this process' torch."""
    if _new_process_group_helper is None:
        raise ConfigError(
            f"weights.carrier=collective: torch {torch.__version__} has no _new_process_group_helper; {_HELP}"
        )
    if backend == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise ConfigError(
            "weights.backend=nccl needs a learner with a GPU, and torch sees none on this host; set "
            "weights.backend=gloo (or auto), or run the learner where there is one"
        )


def interface_of(host: str) -> str:
    """Name of the network interface with that numeric address. WeightSyncError when there is none."""
    wanted = ipaddress.ip_address(host.partition("%")[0])
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            found = ipaddress.ip_address(address.address.partition("%")[0])
            # All of 127.0.0.0/8 is the loopback interface, which lists one of them.
            if found == wanted or (found.version == wanted.version and found.is_loopback and wanted.is_loopback):
                return str(name)
    raise WeightSyncError(f"no network interface of this host has the address {host} of weights.bind")


def listen_at(host: str) -> None:
    """Have groups of this process listen on the interface of host only. Before the first one is made."""
    name = interface_of(host)
    os.environ["GLOO_SOCKET_IFNAME"] = name
    # Who set it knows of a faster network than the one of weights.bind.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


class Group:
    """Rank 0 of one group. The store listens from the start, the group is there after join()."""

    def __init__(self, host: str, name: str, ranks: int, backend: str, timeout_s: float) -> None:
        """host: numeric address that the store listens at. timeout_s: of every later step. WeightSyncError."""
        self._name, self._size, self._backend = name, 1 + ranks, backend
        self._timeout = timedelta(seconds=timeout_s)
        listen_at(host)
        try:
            # torch would listen on all interfaces, so the socket is made here.
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as bound:
                bound.bind((host, 0))
                bound.listen(socket.SOMAXCONN)
                self.port = int(bound.getsockname()[1])
                self._store = TCPStore(
                    host, self.port, self._size, True, self._timeout, wait_for_workers=False,
                    master_listen_fd=bound.detach(),
                )  # fmt: skip
        except (OSError, RuntimeError) as exc:
            raise WeightSyncError(f"no store for the group {name} at {host}: {exc}") from exc
        self._group: dist.ProcessGroup | None = None

    @property
    def joined(self) -> bool:
        """True when the group is there."""
        return self._group is not None

    def join(self) -> None:
        """Make the group; waits for every process of the engine (gloo; nccl waits in the first broadcast)."""
        assert _new_process_group_helper is not None
        try:
            self._group, _ = _new_process_group_helper(
                self._size, 0, [], dist.Backend(self._backend), PrefixStore(self._name, self._store),
                group_name=self._name, timeout=self._timeout,  # type: ignore[arg-type]
            )  # fmt: skip
        except TypeError as exc:
            raise WeightSyncError(f"torch {torch.__version__} makes groups in another way; {_HELP}: {exc}") from exc
        except (RuntimeError, ValueError) as exc:
            raise WeightSyncError(f"the engine did not join the group {self._name}: {exc}") from exc

    def broadcast(self, data: Tensor) -> None:
        """Send data to every process of the engine; waits until it left this one. WeightSyncError."""
        assert self._group is not None, "join() first"
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        try:
            self._group.broadcast([data], options).wait()
            if data.is_cuda:
                # wait() of nccl orders streams only.
                torch.cuda.synchronize(data.device)
        except RuntimeError as exc:
            raise WeightSyncError(f"a broadcast in the group {self._name} failed: {exc}") from exc

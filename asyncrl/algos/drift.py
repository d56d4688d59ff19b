"""Router drift: how differently two sets of weights use the experts on the same response.

Counts are integers and stay so until one division at the end, so the drift of a response has the
same bits for any padding, packing, device or rank split. Knows nothing of tokens, versions or
which of its inputs came from a generator.

Axes: B responses, S input positions, L MoE layers, K experts chosen per token, E experts.
"""

from __future__ import annotations

import torch

from asyncrl.errors import RouteError

_INTEGERS = frozenset(
    {torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64}
)
_WIDE_IDS = 2**22
"""Ids that are widened at once (16 MB in int32): a few responses, or one that is longer."""


def expert_counts(routes: torch.Tensor, mask: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Count how often each expert was chosen at the counted positions of each response.

    routes: any integer type [B, S, L, K]. mask: bool or number [B, S], non-zero where a position
    counts (the loss mask of the next token, where its routes are known). What the routes hold elsewhere (pads,
    -1, prompt rows) is never read. Returns int64 [B, L, E]; each (response, layer) sums to T * K.
    Raises RouteError for wrong shapes, and for an id outside [0, E) at a counted position: a
    position without a route must be left out of the mask, on both sides.
    """
    if routes.dim() != 4 or routes.dtype not in _INTEGERS:
        raise RouteError(f"routes must be integers [B, S, L, K], got {routes.dtype} {list(routes.shape)}")
    batch, length, layers, _ = routes.shape
    if mask.shape != (batch, length):
        raise RouteError(f"mask must be [B, S] = [{batch}, {length}], got {list(mask.shape)}")
    if num_experts < 1 or layers * num_experts > 2**31 - 1:
        raise RouteError(f"num_experts={num_experts} with {layers} layers is out of range")
    mask_BS = mask.to(routes.device) != 0
    counts = torch.zeros(batch, layers, num_experts, dtype=torch.int64, device=routes.device)
    per_row = max(1, length * layers * routes.shape[3])
    rows = max(1, min(_WIDE_IDS // per_row, (2**31 - 1) // (layers * num_experts or 1)))
    for b in range(0, batch, rows):
        counts[b : b + rows] = _count(routes[b : b + rows], mask_BS[b : b + rows], num_experts, b)
    return counts


def _count(routes_BSLK: torch.Tensor, mask_BS: torch.Tensor, num_experts: int, first: int) -> torch.Tensor:
    """Counts [B, L, E] of a few responses in one histogram; first is the number of the first."""
    batch, _, layers, _ = routes_BSLK.shape
    row_N = torch.arange(batch, device=mask_BS.device, dtype=torch.int32)[:, None].expand_as(mask_BS)[mask_BS]
    ids_NLK = routes_BSLK[mask_BS].to(torch.int32)
    if ids_NLK.numel():
        low, high = map(int, ids_NLK.aminmax())
        if low < 0 or high >= num_experts:
            wrong = low if low < 0 else high
            b = first + int(row_N[(ids_NLK == wrong).flatten(1).any(dim=1)][0])
            raise RouteError(f"response {b}: expert id {wrong} outside [0, {num_experts}) at a counted position")
    layer_L1 = torch.arange(layers, device=mask_BS.device, dtype=torch.int32)[:, None]
    bins_NLK = ids_NLK + (row_N[:, None, None] * layers + layer_L1) * num_experts
    return torch.bincount(bins_NLK.flatten(), minlength=batch * layers * num_experts).view(batch, layers, num_experts)


def route_drift(rollout_counts: torch.Tensor, native_counts: torch.Tensor) -> torch.Tensor:
    """Router drift D_route of each response, in [0, 1].

    Both arguments: integers [B, L, E] with equal totals per (response, layer). Returns float64 [B],
    NaN where no token counts and nowhere else.
    D = sum_{l,e} |c_rollout - c_native| / (2 L T K) (Router Drift Control, section 3; DESIGN section 4).
    Raises RouteError that names the response whose totals differ between sides or layers.
    """
    moved_BL, total_BL = _moved(rollout_counts, native_counts)
    uneven_B = (total_BL != total_BL[:, :1]).any(dim=1)
    if bool(uneven_B.any()):
        b = int(uneven_B.nonzero()[0])
        raise RouteError(f"response {b}: layers count different numbers of routes: {total_BL[b].tolist()}")
    # 0 / 0 is the NaN of a response without a counted token.
    return moved_BL.sum(dim=1).double() / (2 * total_BL.sum(dim=1)).double()


def layer_drift(rollout_counts: torch.Tensor, native_counts: torch.Tensor) -> torch.Tensor:
    """Router drift d_l of each response and layer, in [0, 1].

    Arguments and errors as in `route_drift`. Returns float64 [B, L], NaN where no token counts; the
    mean over L is `route_drift`.
    """
    moved_BL, total_BL = _moved(rollout_counts, native_counts)
    return moved_BL.double() / (2 * total_BL).double()


def _moved(rollout_counts: torch.Tensor, native_counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Absolute count differences and totals, int64 [B, L] each."""
    for name, counts in (("rollout_counts", rollout_counts), ("native_counts", native_counts)):
        if counts.dim() != 3 or counts.dtype not in _INTEGERS:
            raise RouteError(f"{name} must be integers [B, L, E], got {counts.dtype} {list(counts.shape)}")
    if rollout_counts.shape != native_counts.shape:
        raise RouteError(f"counts differ in shape: {list(rollout_counts.shape)} and {list(native_counts.shape)}")
    if rollout_counts.shape[1] == 0:
        raise RouteError("counts have no layer: drift is undefined on a dense model")
    rollout_BLE = rollout_counts.to(torch.int64)
    native_BLE = native_counts.to(device=rollout_BLE.device, dtype=torch.int64)
    rollout_BL, native_BL = rollout_BLE.sum(dim=2), native_BLE.sum(dim=2)
    differs = (rollout_BL != native_BL).nonzero()
    if len(differs):
        b, layer = differs[0].tolist()
        raise RouteError(
            f"response {b}, layer {layer}: rollout counts sum to {int(rollout_BL[b, layer])} "
            f"but native counts to {int(native_BL[b, layer])}; both sides must count the same tokens"
        )
    return (rollout_BLE - native_BLE).abs().sum(dim=2), rollout_BL

"""The attention kernel on the inputs of the op's other tests."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.kernels.encoding import Activation, Encoding
from workers.engine.kernels.tree_attention import Segments, kernel
from workers.engine.staging import DeviceBuffer, HostBuffer


@dataclass(frozen=True)
class Heads:
    """q [T, H, D], k and v [T, N, D] of a pass; stores [L, N, D] each."""

    q: Tensor
    k: Tensor
    v: Tensor
    stores: Sequence[tuple[Tensor, Tensor]] = ()


def device_plan(segments: Segments, x: Heads, windows: Sequence[int | None]) -> kernel.DevicePlan:
    """The kernel's plan where x lies."""
    buffer = HostBuffer()
    t, h, d = x.q.shape
    layout = h // x.k.shape[1], d
    lengths = [k.shape[0] for k, _ in x.stores]
    plan = kernel.stage(segments, buffer, {layout: windows}, rows=t, store_lengths=lengths)[layout]
    return kernel.on_device(plan, DeviceBuffer(buffer.pack(pinned=False), x.q.device))


def attend(
    segments: Segments,
    x: Heads,
    window: int | None,
    *,
    encoding: Encoding | None = None,
    plan: kernel.DevicePlan | None = None,
) -> Activation:
    """The op; key rows of stores hold NaN until the op fills them."""
    plan = plan or device_plan(segments, x, (window,))
    k, v = (torch.cat([a, a.new_full((plan.extra_rows, *a.shape[1:]), float("nan"))]) for a in (x.k, x.v))
    encoding = encoding or Encoding("float", x.q.dtype)
    return kernel.tree_attention(x.q, k, v, x.stores, plan, window=window, encoding=encoding)

"""What bf16 may change: the first-order effect of every rounding on a log-probability, from the float32 reference.

A rounding to bf16 multiplies each element t_i of a tensor by (1 + δ_i). To first order a log-probability L moves by
Σ_i ∂L/∂t_i · t_i · δ_i over all rounded tensors. |δ| ≤ 2^-8 (8 significant bits, to nearest), and with mantissas spread
logarithmically its root mean square is 2^-8 · √(1/3 · 3/(8 ln 2)) = 2^-8 · 0.425. The δ of different elements being
independent, L moves by a random amount of standard deviation

    σ = 2^-8 · 0.425 · √(Σ_i (∂L/∂t_i · t_i)²).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from workers.engine.kernels.lm_head.half import EXACT_EVERY

RMS = 2**-8 * math.sqrt(1 / (8 * math.log(2)))


@contextmanager
def rounded_tensors(model: Any, *, weights: bool = False) -> Iterator[list[Tensor]]:
    """The tensors that our bf16 forward rounds, from each forward of a transformers Gemma model while this lasts.

    They are what linears and head read, what linears write, and queries, keys and values as attention reads them; on a
    GPU also the `weights` of the attention.
    """
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> None:
        found.append(tensor)

    def output(_module: Any, _inputs: Any, result: Tensor) -> None:
        keep(result)

    def attended(_module: Any, _inputs: Any, result: tuple[Tensor, Tensor]) -> None:
        keep(result[1])

    def argument(_module: Any, inputs: tuple[Tensor, ...]) -> None:
        keep(inputs[0])

    rotary = _rotary(type(model).__module__, keep)
    with ExitStack() as stack:
        stack.enter_context(rotary)
        for layer in model.model.layers:
            attention = layer.self_attn
            norms = [layer.input_layernorm, layer.pre_feedforward_layernorm, getattr(attention, "v_norm", None)]
            linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
            linears += [layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj]
            hooks = [module.register_forward_hook(output) for module in norms + linears if module is not None]
            hooks += [module.register_forward_pre_hook(argument) for module in (attention.o_proj, layer.mlp.down_proj)]
            if weights:
                hooks.append(attention.register_forward_hook(attended))
            for hook in hooks:
                stack.callback(hook.remove)
        stack.callback(model.model.norm.register_forward_hook(output).remove)
        yield found


def _rotary(module: str, keep: Callable[[Tensor], None]) -> Any:
    """The module's rotation, whose results are kept: both of q and k, or one of them."""
    namespace = __import__(module, fromlist=["apply_rotary_pos_emb"])
    plain = namespace.apply_rotary_pos_emb

    def rotate(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        for tensor in result if isinstance(result, tuple) else (result,):
            keep(tensor)
        return result

    return patch.object(namespace, "apply_rotary_pos_emb", rotate)


@contextmanager
def _kept_logits(model: Any) -> Iterator[list[Tensor]]:
    """What the head gives, before the soft-cap."""
    kept: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _module, _inputs, result: kept.append(result))
    yield kept
    hook.remove()


def deviations(model: Any, ids: tuple[int, ...], columns: list[int]) -> list[float]:
    """σ of log P(column | ids) for each column.

    The head's logits are rounded in the sum over the vocabulary alone, and the largest of every `EXACT_EVERY` is not.
    """
    with torch.enable_grad(), rounded_tensors(model) as tensors, _kept_logits(model) as kept:
        capped = model(torch.tensor([ids])).logits[0, -1]
        total = torch.logsumexp(capped, -1)
        effect = (torch.autograd.grad(total, kept[0], retain_graph=True)[0] * kept[0].detach())[0, -1]
        for group, logits in zip(torch.split(effect, EXACT_EVERY), torch.split(capped, EXACT_EVERY), strict=True):
            group[logits.argmax()] = 0.0
        of_sum = float(effect.double().square().sum())
        row = capped - total
        out = []
        for column in columns:
            grads = torch.autograd.grad(row[column], tensors, retain_graph=True)
            effects = (grad * tensor.detach() for grad, tensor in zip(grads, tensors, strict=True))
            out.append(RMS * math.sqrt(of_sum + sum(float(effect.double().square().sum()) for effect in effects)))
    return out

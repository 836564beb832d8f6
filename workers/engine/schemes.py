"""Puts a scheme's linears in the place of a model's own, before its weights are loaded."""

import torch
from torch import Tensor, nn

from workers.engine.errors import LoadError
from workers.engine.layers.linear import Linear
from workers.engine.quant import Fp8Linear, QuantLinear, make_linear
from workers.engine.quant.calibration import Calibration
from workers.engine.weights import Loadable, decoder_linears


def use_scheme(model: Loadable, scheme: str) -> None:
    """Every linear of the decoder layers becomes an empty one of the scheme (`quant.SCHEMES`); the rest stays.

    `load_weights` fills them: it copies codes that are stored in the scheme's own form and quantizes everything else.
    """
    modules = {place.module for place in decoder_linears(model).values()}
    for name, module in _modules(model).items():
        if module in modules and isinstance(module, Linear):
            parent, _, own = name.rpartition(".")
            with module.weight.device:
                linear = make_linear(scheme, module.weight.shape[1], module.parts, module.weight.dtype)
            setattr(model.get_submodule(parent), own, linear)


def set_input_scales(model: Loadable, calibration: Calibration) -> None:
    """The activation scales of a calibration, for a model in `fp8s` whose checkpoint brought none."""
    linears = decoder_linears(model)
    calibration.check_names(linears)
    for name, place in linears.items():
        if isinstance(place.module, Fp8Linear):
            place.module.input_scales[place.part] = calibration.scales[name]


def check_input_scales(model: Loadable) -> None:
    """Called once when weights and scales are in place. LoadError where a linear in `fp8s` cannot be run:

    it has no activation scale, because neither the checkpoint nor a calibration gave one; or, on a GPU, its parts have
    different ones (`calibrate` gives them the same: they see one input).
    """
    for name, place in decoder_linears(model).items():
        if isinstance(place.module, Fp8Linear) and place.module.static:
            scale: Tensor = place.module.input_scales[place.part]
            if not torch.isfinite(scale):
                raise LoadError(f"{name} has no input_scale: fp8s needs a calibrated checkpoint")
    for name, linear in quant_linears(model).items():
        if isinstance(linear, Fp8Linear) and linear.static and linear.on_gpu:
            try:
                linear.share_input()
            except ValueError as error:
                raise LoadError(f"{name} {error}") from None


def _modules(model: Loadable) -> dict[str, nn.Module]:
    assert isinstance(model, nn.Module)
    return dict(model.named_modules())


def quant_linears(model: Loadable) -> dict[str, QuantLinear]:
    """The scheme's linears by module name."""
    return {name: module for name, module in _modules(model).items() if isinstance(module, QuantLinear)}

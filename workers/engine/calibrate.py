"""The largest input of every linear over a corpus, from the engine's own forward under dynamic fp8."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from spinf_serve.plan import ScorePlan
from workers.engine.errors import LoadError
from workers.engine.kernels.encoding import Encoding
from workers.engine.kernels.products import RowRule
from workers.engine.models import GemmaModel, model_config
from workers.engine.models.config import read_config
from workers.engine.packing import PlanCursor, Share, build_pass
from workers.engine.quant import QuantLinear
from workers.engine.quant.compressed_tensors import Fp8Static
from workers.engine.runner import Runner
from workers.engine.schemes import quant_linears, use_scheme
from workers.engine.sizes import check_sizes
from workers.engine.weights import Progress, decoder_linears, load_weights


class _Observed(nn.Module):
    """A linear that notes the largest input. Rows after the `rows` real ones are padding: they read as zeros."""

    def __init__(self, linear: QuantLinear) -> None:
        super().__init__()
        self.linear = linear
        self.rows = 0
        self.amax = torch.zeros(())

    @property
    def encoding(self) -> Encoding:
        """The linear's."""
        return self.linear.encoding

    @property
    def pending(self) -> Tensor | None:
        """The linear's."""
        return self.linear.pending

    def forward(self, x: Tensor, rule: RowRule) -> Tensor:
        x = x.clone()
        x[self.rows :] = 0
        self.amax = torch.maximum(self.amax, x.abs().amax())  # maximum keeps a NaN
        return self.linear(x, rule)  # type: ignore[no-any-return]


class Calibrator:
    """A model under dynamic fp8 (`fp8`) with every linear of its decoder observed."""

    def __init__(self, snapshot_dir: Path, on_progress: Progress | None = None) -> None:
        """Loads the snapshot. LoadError for one that cannot be served."""
        if Fp8Static.from_json(read_config(snapshot_dir)) is not None:
            raise LoadError(f"{snapshot_dir} is quantized already: calibrate the checkpoint in full precision")
        config = model_config(snapshot_dir)
        check_sizes(config, snapshot_dir)
        self._model = GemmaModel(config)
        use_scheme(self._model, "fp8")
        load_weights(self._model, snapshot_dir, on_progress)
        places = decoder_linears(self._model)
        observed = {linear: self._observe(name, linear) for name, linear in quant_linears(self._model).items()}
        self._observed = {name: observed[place.module] for name, place in places.items()}  # type: ignore[index]
        self._runner = Runner(self._model, RowRule())

    def _observe(self, name: str, linear: QuantLinear) -> _Observed:
        observed = _Observed(linear)
        parent, _, own = name.rpartition(".")
        setattr(self._model.get_submodule(parent), own, observed)
        return observed

    @torch.inference_mode()
    def run(self, tokens: Sequence[int]) -> None:
        """One text in a pass of its own: its tokens as the model reads them, `<bos>` included."""
        plan = _text_plan(tokens)
        piece = PlanCursor(plan, len(tokens), len(tokens)).take(len(tokens))
        assert piece is not None
        staged = self._runner.stage(build_pass([Share("calibrate", plan, piece)]))
        for observed in self._observed.values():
            observed.rows = len(tokens)
        self._model.model(staged.forward)

    def amax(self) -> dict[str, float]:
        """The largest |input| so far, by the checkpoint name of each linear. LoadError where one is not finite."""
        found = {name: float(observed.amax) for name, observed in self._observed.items()}
        for name, value in found.items():
            if not np.isfinite(value):
                raise LoadError(f"the input of {name} was not finite: the checkpoint cannot be calibrated")
        return found


def _text_plan(tokens: Sequence[int]) -> ScorePlan:
    """One chain whose rows are all read, so that the last layer computes every row too."""
    count = len(tokens)
    return ScorePlan(
        tokens=np.array(tokens, dtype=np.int32),
        parents=np.arange(-1, count - 1, dtype=np.int32),
        job_offsets=np.array([0, count], dtype=np.int64),
        prefix_lens=np.array([count], dtype=np.int32),
        read_rows=np.arange(count, dtype=np.int32),
        col_offsets=np.arange(count + 1, dtype=np.int64),
        cols=np.zeros(count, dtype=np.int32),
    )


def calibrate(
    snapshot_dir: Path,
    texts: Iterable[Sequence[int]],
    on_text: Callable[[int], None] | None = None,
    on_load: Progress | None = None,
) -> dict[str, float]:
    """amax of every linear over the texts; `on_text` is called with the number of texts done, `on_load` with bytes."""
    calibrator = Calibrator(snapshot_dir, on_load)
    for done, tokens in enumerate(texts, start=1):
        calibrator.run(tokens)
        if on_text is not None:
            on_text(done)
    return calibrator.amax()

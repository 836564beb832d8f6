"""One folder per op: public function, `reference.py` (plain float32 torch), `cpu.py` (fast and row-invariant).

Layers import the public function of an op's package and nothing else. Letters that every op shares:

T  rows of the pass, a multiple of `RowRule.multiple`     R  rows whose logits are read, padded likewise
H  query heads    N  key/value heads    G = H // N        D  head dimension
K  input width    O  output width       V  vocabulary     B  positions in one attention block

Row-invariant: the bits of an output row depend on that row's inputs alone, not on how many rows there are, where the
row stands, or how many threads compute. Three facts carry it on the CPU, and `selfcheck` measures all of them at start:
library products sum over K in one order for every row count from `RowRule.multiple` on; exp, tanh, cos and sin (vector
library) give one value wherever an element stands, which gelu and sigmoid (scalar code at a loop's end) do not; a sum
over the last dimension has an order of its own length alone. No op uses a fused multiply-add spelled in torch
(`addcmul`, `alpha=`): its vector and scalar code may round differently.
"""

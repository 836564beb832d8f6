"""The evaluation of packs.md once more, from the page alone: numpy float64 over the raw JSON, plain and slow."""

import base64
import hashlib
import json
from typing import Any

import numpy as np


def evaluate(pack: dict[str, Any], result: dict[str, Any], **call: Any) -> dict[str, Any]:
    z = {read["id"]: read_z(read, answer(pack, result, read)) for read in pack["reads"]}
    macros = {name: macro(pack, name, z) for name in pack["categories"]}
    scores, cuts, flagged = {}, {}, {}
    for name, category in pack["categories"].items():
        a, b = category["platt"]
        scores[name] = float(np.exp(-np.logaddexp(0.0, -(a * macros[name] + b))))
        cuts[name] = category["threshold"]
    cuts.update(call.get("thresholds") or {})
    for name in pack["categories"]:
        flagged[name] = None if cuts[name] is None else scores[name] >= cuts[name]
    for _ in pack["categories"]:  # the longest chain of requirements is one per category
        flagged = {name: f and all(flagged[r] for r in required(pack, name)) for name, f in flagged.items()}
    categories = {
        name: {"score": scores[name], "percentile": percentile(category, scores[name]), "flagged": flagged[name]}
        for name, category in pack["categories"].items()
    }
    return {"categories": categories, "decision": decide(pack, z, macros, scores, cuts, flagged, call)}


def required(pack: dict[str, Any], name: str) -> list[str]:
    return pack["categories"][name].get("requires", [])


def answer(pack: dict[str, Any], result: dict[str, Any], read: dict[str, Any]) -> Any:
    query = next(q for q in result["queries"] if q["id"] == read["query"])
    combination = next(c for c in query["combinations"] if c["values"].get("F") == read.get("F"))
    if pack.get("answers", "p") == "p":
        return np.array([o["p"] for o in combination["options"]])
    logprobs = np.array([o["logprob"] for o in combination["options"]])
    return np.exp(logprobs - np.logaddexp.reduce(logprobs))


def read_z(read: dict[str, Any], p: Any) -> float:
    p = np.maximum(p, 1e-9)
    if read["kind"] == "pair":
        ratio = np.clip(p[0] / (p[0] + p[1]), 1e-6, 1 - 1e-6)
        value = read.get("sign", 1) * np.log(ratio / (1 - ratio))
    else:
        a = np.log(p / p.sum()) - np.asarray(read["mu"])
        if read["kind"] == "option":
            value = a[read["option"]]
        elif read["kind"] == "any":
            value = np.logaddexp.reduce(a[1:]) - a[0]
        else:
            chosen = np.isin(np.arange(len(p)), read["unsafe"])
            value = np.logaddexp.reduce(a[chosen]) - np.logaddexp.reduce(a[~chosen])
    return float((value - read["mean"]) / read["sd"])


def macro(pack: dict[str, Any], name: str, z: dict[str, float]) -> float:
    reads = [read for read in pack["reads"] if read["category"] == name]
    if pack["categories"][name].get("aggregate") != "views":
        return float(np.mean([z[read["id"]] for read in reads]))
    views = {read["view"] for read in reads if "view" in read}
    return float(np.mean([np.mean([z[r["id"]] for r in reads if r.get("view") == view]) for view in sorted(views)]))


def percentile(category: dict[str, Any], score: float) -> float | None:
    quantiles = category.get("normal_quantiles")
    return None if quantiles is None else float(np.interp(score, quantiles["values"], quantiles["levels"]))


def decide(
    pack: dict[str, Any],
    z: dict[str, float],
    macros: dict[str, float],
    scores: dict[str, float],
    cuts: dict[str, Any],
    flagged: dict[str, Any],
    call: dict[str, Any],
) -> dict[str, Any]:
    settings = pack["decision"]
    mode, threshold = call.get("mode") or settings["mode"], call.get("threshold")
    deciding = [n for n, c in pack["categories"].items() if cuts[n] is not None and c.get("decides", True)]
    warned = False
    if mode == "micro_layer" and settings["micro_layer"]["lock"] != lock(pack):
        mode, threshold, warned = settings.get("fallback", "per_category"), None, True
    if mode == "micro_layer":
        value, own = layer(settings["micro_layer"], z, macros)
        cut = own if threshold is None else threshold
        out = {"unsafe": bool(value >= cut), "mode": mode, "score": value, "threshold": cut}
    elif mode == "max":
        cut = settings["max"]["threshold"] if threshold is None else threshold
        top = max(deciding, key=lambda name: scores[name]) if deciding else None
        score = scores[top] if top else 0.0
        out = {"unsafe": bool(top and score >= cut), "mode": mode, "score": score, "threshold": cut, "category": top}
    else:
        named = [name for name in deciding if flagged[name]]
        out = {"unsafe": bool(named), "mode": mode, "categories": named}
    critical = settings.get("critical", []) if call.get("critical") is None else call["critical"]
    if named := [name for name in critical if flagged[name]]:
        out["critical"] = named
        if not out["unsafe"]:
            out["unsafe"], out["by"] = True, "critical"
    if warned:
        out["warning"] = "…"
    return out


def layer(settings: dict[str, Any], z: dict[str, float], macros: dict[str, float]) -> tuple[float, float]:
    x = np.array([(macros if name[0] == "c" else z)[name[2:]] for name in settings["inputs"]])
    w = np.frombuffer(base64.b64decode(settings["weights"]), "<f4").astype(np.float64)
    hidden, n = settings.get("hidden"), len(x)
    if hidden is None:
        return float(w[:n] @ x + w[n]), float(w[n + 1])
    w1, b1 = w[: n * hidden].reshape(n, hidden), w[n * hidden : (n + 1) * hidden]
    w2, b2 = w[(n + 1) * hidden : (n + 2) * hidden], w[(n + 2) * hidden]
    return float(np.tanh(x @ w1 + b1) @ w2 + b2), float(w[-1])


def lock(pack: dict[str, Any]) -> str:
    locked = {
        "queries": pack["scoring"]["queries"],
        "reads": pack["reads"],
        "platt": {name: category["platt"] for name, category in pack["categories"].items()},
        "inputs": pack["decision"]["micro_layer"]["inputs"],
    }
    return "sha256:" + hashlib.sha256(json.dumps(locked, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

"""Calibrate a draft pack: score a labelled baseline with it, fit its numbers, write the pack, its lock and a fixture.

    python fit.py score drafts/forum-guard.json baseline/forum-guard.jsonl results.json --device cpu
    python fit.py fit   drafts/forum-guard.json baseline/forum-guard.jsonl results.json packs/forum-guard/1.0.json

A line of the baseline is {"id", "text", "params"?, "labels": [category, …]}; texts without labels are normal traffic.
Needs numpy, scipy and scikit-learn (the extra `calibrate`); `score` needs the extra `server`, or --url of a server.
"""

import argparse
import copy
import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import expit, log_softmax
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import precision_recall_curve

from spinf_serve import packs
from spinf_serve.packs.answers import answers_of
from spinf_serve.packs.evaluation import P_CLIP, category_macros, evaluate, read_value
from spinf_serve.packs.model import ANY, OPTION, SET, PackModel
from spinf_serve.packs.pack import Pack, from_data

F64 = npt.NDArray[np.float64]
LEVELS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
DIGITS = 6  # of every number in the file


def read_baseline(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def score(draft: Pack, rows: Sequence[dict[str, Any]], call: Any) -> list[dict[str, Any]]:
    """The baseline's results, in its order; `call` turns a /v1/score body into a response."""
    results = []
    for start in range(0, len(rows), 16):
        part = rows[start : start + 16]
        params = [row.get("params", {}) for row in part]
        body = draft.request([row["text"] for row in part], ids=[row["id"] for row in part], params=params)
        results += call(body)["results"]
    return results


def fit(data: dict[str, Any], rows: Sequence[dict[str, Any]], results: list[dict[str, Any]], rate: float) -> Any:
    """The fitted pack file. `rate` is the share of normal traffic that each deciding category may flag.

    Every step reads the numbers of the one before as they stand in the file, rounded: what is fitted is what is served.
    """
    data, normal = copy.deepcopy(data), np.array([not row["labels"] for row in rows])
    draft = from_data(data, "draft", draft=True).model
    fit_reads(data, draft, results, normal)
    # From here on the pack is read with neutral Platt pairs, so that its reads and macros can be evaluated.
    for category in data["categories"].values():
        category |= {"platt": [1.0, 0.0], "threshold": None}
    decision = data.pop("decision")
    model = from_data(data | {"decision": {"mode": "per_category"}}, "reads").model
    z = [{r.id: (read_value(r, answers_of(model, result)) - r.mean) / r.sd for r in model.reads} for result in results]
    macros = [category_macros(model, values) for values in z]
    fit_categories(data, macros, rows, normal, rate)
    data["decision"] = fit_decision(data, decision, z, macros, rows)
    return data


def fit_reads(data: dict[str, Any], draft: PackModel, results: list[dict[str, Any]], normal: Any) -> None:
    """mu = the mean log share of an option over normal traffic; then mean and sd of the read's value over it."""
    answers = [answers_of(draft, result) for result, plain in zip(results, normal, strict=True) if plain]
    for read, entry in zip(draft.reads, data["reads"], strict=True):
        shares = log_softmax(np.log(np.maximum([a[read.query, read.F] for a in answers], P_CLIP)), axis=1)
        mu = [round(float(x), DIGITS) for x in shares.mean(axis=0)]
        if read.kind in (ANY, SET):
            entry["mu"] = mu
        elif read.kind == OPTION:
            entry["mu"] = mu[read.option]
        entry |= {"mean": 0.0, "sd": 1.0}
    centred = from_data(data, "draft", draft=True).model
    for read, entry in zip(centred.reads, data["reads"], strict=True):
        values = np.array([read_value(read, a) for a in answers])
        entry["mean"], entry["sd"] = (
            round(float(values.mean()), DIGITS),
            round(max(float(values.std(ddof=1)), 1e-3), DIGITS),
        )


def fit_categories(
    data: dict[str, Any], macros: list[dict[str, float]], rows: Sequence[dict[str, Any]], normal: Any, rate: float
) -> None:
    """Platt pair by logistic regression, quantiles and threshold from normal traffic."""
    for name, category in data["categories"].items():
        x = np.array([macro[name] for macro in macros])
        labels = np.array([name in row["labels"] for row in rows])
        if labels.all() or not labels.any():
            raise SystemExit(f"{name}: the baseline needs texts with this label and texts without it")
        a, b = logistic(x[:, None], labels)
        category["platt"] = [round(float(a[0]), DIGITS), round(b, DIGITS)]
        if a[0] <= 0:
            print(f"warning: {name}: its reads do not separate the labels (a = {a[0]:.3f})")
        scores = expit(category["platt"][0] * x + category["platt"][1])
        values = np.round(np.quantile(scores[normal], LEVELS), DIGITS)
        category["normal_quantiles"] = {"levels": list(LEVELS), "values": values.tolist()}
        cut = round(float(np.quantile(scores[normal], 1 - rate)), DIGITS)
        category["threshold"] = cut if category.get("decides", True) else None


def logistic(x: F64, y: Any) -> tuple[F64, float]:
    """Weights and bias; a little regularisation keeps a separable baseline finite."""
    model = LogisticRegression(C=10.0, max_iter=1000).fit(x, y)
    return model.coef_[0], float(model.intercept_[0])


def fit_decision(
    data: dict[str, Any],
    decision: dict[str, Any],
    z: list[dict[str, float]],
    macros: list[dict[str, float]],
    rows: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """The threshold of max, and the micro-layer where the draft's mode asks for one: every category and every read."""
    deciding = [name for name, category in data["categories"].items() if category["threshold"] is not None]
    unsafe = np.array([any(name in row["labels"] for name in deciding) for row in rows])
    platt = {name: data["categories"][name]["platt"] for name in deciding}
    top = np.array([max(expit(platt[name][0] * macro[name] + platt[name][1]) for name in deciding) for macro in macros])
    decision = decision | {"max": {"threshold": round(best_f1(top, unsafe), DIGITS)}}
    if decision["mode"] != "micro_layer":
        return decision
    inputs = [f"c:{name}" for name in data["categories"]] + [f"r:{read['id']}" for read in data["reads"]]
    x = np.array([[*macro.values(), *values.values()] for macro, values in zip(macros, z, strict=True)])
    weights, bias = logistic(x, unsafe)
    weights32 = np.append(weights, bias).astype(np.float32).astype(np.float64)
    cut = best_f1(x @ weights32[:-1] + weights32[-1], unsafe)
    decision["micro_layer"] = {"inputs": inputs, "weights": packs.encode_weights([*weights32, cut]), "dtype": "float32"}
    decision["micro_layer"]["lock"] = packs.lock_of(data | {"decision": decision})
    return decision


def best_f1(values: F64, truth: Any) -> float:
    """A cut with the best F1: halfway between the lowest value that it takes in and the next one below."""
    precision, recall, cuts = precision_recall_curve(truth, values)
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    cut = cuts[int(np.argmax(f1[:-1]))]
    below = values[values < cut]
    return float((cut + below.max()) / 2) if below.size else float(cut)


def fixture(pack: Pack, results: list[dict[str, Any]]) -> dict[str, Any]:
    """The first results with what they must evaluate to: in the pack's mode, and decided by each category alone."""
    calls: list[dict[str, Any]] = [{}, {"mode": "per_category"}]
    expected = [
        {"input_id": result["input_id"], "with": call}
        | {name: value for name, value in pack.evaluate(result, **call).items() if name in ("categories", "decision")}
        for result in results
        for call in calls
    ]
    return {"results": results, "expected": expected}


def report(pack: Pack, rows: Sequence[dict[str, Any]], results: list[dict[str, Any]]) -> None:
    """How the fitted pack does on its own baseline: an optimistic figure, for finding mistakes."""
    found = [evaluate(pack.model, answers_of(pack.model, result)) for result in results]
    print(f"{'category':>20} {'labelled':>8} {'flagged':>8} {'hits':>5}")
    for name in pack.model.categories:
        flags = [entry["categories"][name]["flagged"] is True for entry in found]
        labels = [name in row["labels"] for row in rows]
        hits = sum(map(all, zip(flags, labels, strict=True)))
        print(f"{name:>20} {sum(labels):8} {sum(flags):8} {hits:5}")
    unsafe = [entry["decision"]["unsafe"] for entry in found]
    print(f"{'decision':>20} {'':8} {sum(unsafe):8}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Calibrate a draft pack.")
    parser.add_argument("step", choices=("score", "fit"))
    parser.add_argument("draft", type=Path)
    parser.add_argument("baseline", type=Path)
    parser.add_argument("results", type=Path, help="written by score, read by fit")
    parser.add_argument("out", type=Path, nargs="?", help="fit: the pack file; its fixture goes to fixtures/ beside it")
    parser.add_argument("--url", help="score: a running server; without it the model is loaded here")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rate", type=float, default=0.02, help="share of normal traffic that a category may flag")
    options = parser.parse_args()
    draft, rows = packs.load(options.draft, draft=True), read_baseline(options.baseline)
    if options.step == "score":
        results = score_anywhere(draft, rows, options)
        options.results.write_text(json.dumps(results), encoding="utf-8")
        return
    if options.out is None:
        parser.error("fit needs the pack file to write")
    results = json.loads(options.results.read_text(encoding="utf-8"))
    data = fit(json.loads(options.draft.read_text(encoding="utf-8")), rows, results, options.rate)
    pack = from_data(data, str(options.out))
    write_json(options.out, data)
    write_json(options.out.parent / "fixtures" / f"{pack.version}.json", fixture(pack, results[:4]))
    report(pack, rows, results)


def score_anywhere(draft: Pack, rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    if options.url:
        return score(draft, rows, lambda body: post(f"{options.url.rstrip('/')}/v1/score", body))
    from spinf_serve import Engine  # loads torch

    with Engine(draft.model.model, device=options.device, warmup="none", on_progress=print) as engine:
        return score(draft, rows, engine.score)


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply)


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Calibrate a draft pack: score a labelled baseline with it, fit its numbers, write the pack, its lock and a fixture.

    python fit.py score drafts/forum-guard.json baseline/forum-guard.jsonl results.json --device cpu
    python fit.py fit   drafts/forum-guard.json baseline/forum-guard.jsonl results.json packs/forum-guard/1.0.json

A line of the baseline is {"id", "text", "params"?, "labels"?: [category, …]}; texts without labels are normal traffic.
Needs numpy, scipy and scikit-learn (the extra `calibrate`); `score` needs the extra `server`, or --url of a server.
"""

import argparse
import copy
import json
import os
import sys
import urllib.error
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
from spinf_serve.protocol.errors import RequestError
from spinf_serve.refusal import StartRefused

F64 = npt.NDArray[np.float64]
LEVELS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
DIGITS = 6  # of every number in the file


class Stop(Exception):
    """Why nothing is written, for the author."""


def read_baseline(path: Path, draft: Pack) -> list[dict[str, Any]]:
    """The lines of a baseline, each with `id`, `text`, `params` and `labels`, checked against the draft."""
    rows, ids = [], set[str]()
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        if not line.strip():
            continue
        row = read_line(line, draft, f"{path}, line {number}")
        if row["id"] in ids:
            raise Stop(f"{path}, line {number}: the id {row['id']} is there twice")
        ids.add(row["id"])
        rows.append(row)
    return rows


def read_line(line: str, draft: Pack, where: str) -> dict[str, Any]:
    try:
        row = {"params": {}, "labels": []} | json.loads(line)
        if not isinstance(row.get("id"), str) or not isinstance(row.get("text"), str):
            raise TypeError("id and text must be strings")
        if unknown := [label for label in row["labels"] if label not in draft.model.categories]:
            raise ValueError(f"no such category: {unknown[0]} (the draft has {', '.join(draft.model.categories)})")
        draft.wrap(row["text"], None, row["params"])
    except (TypeError, ValueError, AttributeError) as error:
        raise Stop(f"{where}: {error}") from None
    return row


def score(draft: Pack, rows: Sequence[dict[str, Any]], call: Any) -> list[dict[str, Any]]:
    """The baseline's results, in its order; `call` turns a /v1/score body into a response."""
    results: list[dict[str, Any]] = []
    for start in range(0, len(rows), 16):
        part = rows[start : start + 16]
        body = draft.request(
            [row["text"] for row in part], ids=[row["id"] for row in part], params=[row["params"] for row in part]
        )
        results += call(body)["results"]
        print(f"scored {len(results)} of {len(rows)} texts", file=sys.stderr, flush=True)
    return results


def asked(draft: Pack) -> dict[str, Any]:
    """What results depend on: kept beside them, so that a draft that was edited since is not fitted on them."""
    return {name: draft.data.get(name) for name in ("model", "parameters", "contexts", "scoring")}


def read_results(path: Path, draft: Pack, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        questions, results = written["asked"], written["results"]
        scored = [(result["input_id"], result["text"]) for result in results]
    except (ValueError, TypeError, LookupError):
        raise Stop(f"{path} was not written by the step score") from None
    if questions != asked(draft):
        raise Stop(f"{path} holds answers to another form of this draft: score it again")
    if scored != [(row["id"], row["text"]) for row in rows]:
        raise Stop(f"{path} holds the results of other texts than the baseline has now: score it again")
    return [{name: value for name, value in result.items() if name != "text"} for result in results]


def fit(data: dict[str, Any], rows: Sequence[dict[str, Any]], results: list[dict[str, Any]], rate: float) -> Any:
    """The fitted pack file. `rate` is the share of normal traffic that each deciding category may flag.

    Every step reads the numbers of the one before as they stand in the file, rounded: what is fitted is what is served.
    """
    data, normal = copy.deepcopy(data), np.array([not row["labels"] for row in rows])
    if normal.sum() < 2:
        raise Stop("the baseline needs normal traffic: texts without labels")
    draft = from_data(data, "draft", draft=True).model
    fit_reads(data, draft, results, normal)
    # From here on the pack is read with neutral Platt pairs, so that its reads and macros can be evaluated.
    for category in data["categories"].values():
        category |= {"platt": [1.0, 0.0], "threshold": None}
    decision = data.pop("decision", {"mode": "per_category"})
    decision.pop("micro_layer", None)  # of an earlier fit
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
        mu = [in_file(x) for x in shares.mean(axis=0)]
        if read.kind in (ANY, SET):
            entry["mu"] = mu
        elif read.kind == OPTION:
            entry["mu"] = mu[read.option]
        entry |= {"mean": 0.0, "sd": 1.0}
    centred = from_data(data, "draft", draft=True).model
    for read, entry in zip(centred.reads, data["reads"], strict=True):
        values = np.array([read_value(read, a) for a in answers])
        entry["mean"], entry["sd"] = in_file(values.mean()), in_file(max(values.std(ddof=1), 1e-3))


def in_file(number: Any) -> float:
    """A number as the file holds it; never -0.0, which other languages' JSON does not keep."""
    return round(float(number), DIGITS) + 0.0


def fit_categories(
    data: dict[str, Any], macros: list[dict[str, float]], rows: Sequence[dict[str, Any]], normal: Any, rate: float
) -> None:
    """Platt pair by logistic regression, quantiles and threshold from normal traffic."""
    for name, category in data["categories"].items():
        x = np.array([macro[name] for macro in macros])
        labels = np.array([name in row["labels"] for row in rows])
        if labels.all() or not labels.any():
            raise Stop(f"{name}: the baseline needs texts with this label and texts without it")
        a, b = logistic(x[:, None], labels)
        category["platt"] = [in_file(a[0]), in_file(b)]
        if a[0] <= 0:
            print(f"warning: {name}: its reads do not separate the labels (a = {a[0]:.3f})")
        scores = expit(category["platt"][0] * x + category["platt"][1])
        values = [in_file(x) for x in np.quantile(scores[normal], LEVELS)]
        category["normal_quantiles"] = {"levels": list(LEVELS), "values": values}
        cut = in_file(np.quantile(scores[normal], 1 - rate))
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
    if not deciding:
        if decision["mode"] != "per_category":
            raise Stop(f"no category decides, so there is nothing to fit for the mode {decision['mode']}")
        return decision
    unsafe = np.array([any(name in row["labels"] for name in deciding) for row in rows])
    platt = {name: data["categories"][name]["platt"] for name in deciding}
    top = np.array([max(expit(platt[name][0] * macro[name] + platt[name][1]) for name in deciding) for macro in macros])
    decision = decision | {"max": {"threshold": in_file(best_f1(top, unsafe))}}
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


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    try:
        draft = packs.load(options.draft, draft=True)
        rows = read_baseline(options.baseline, draft)
        options.run(draft, rows, options)
    except packs.PackError as error:
        raise SystemExit("\n".join(f"{error.what}: {problem}" for problem in error.problems)) from None
    except (Stop, OSError, packs.EvaluationError, StartRefused, RequestError) as error:
        raise SystemExit(f"fit.py: {error}") from None


def parser() -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    whole = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    steps = whole.add_subparsers(title="steps", required=True, metavar="STEP")
    first = steps.add_parser(
        "score",
        formatter_class=shape,
        help="ask the draft's questions of every text of the baseline",
        description="Ask the draft's questions of every text of the baseline, and keep the answers.",
        epilog="Use the model, quantization and kind of device that will serve the pack: scores differ slightly.",
    )
    second = steps.add_parser(
        "fit",
        help="fit the draft's numbers on those answers and write the pack",
        description="Fit the draft's numbers on the answers; write the pack and a fixture, and say how it does.",
    )
    for step in (first, second):
        step.add_argument("draft", metavar="DRAFT", type=Path, help="the draft pack: drafts/<name>.json")
        step.add_argument("baseline", metavar="BASELINE", type=Path, help="labelled texts: baseline/<name>.jsonl")
    first.add_argument("results", metavar="RESULTS", type=Path, help="file to write the answers to")
    first.add_argument("--url", help="a running server; without it the draft's model is loaded here")
    first.add_argument("--token", default=os.environ.get("SPINF_TOKEN"), help="the server's token (SPINF_TOKEN)")
    first.add_argument("--device", help="where to load the model: cuda:0 (default: SPINF_DEVICE), or cpu")
    first.set_defaults(run=score_step)
    second.add_argument("results", metavar="RESULTS", type=Path, help="the file that score wrote")
    second.add_argument(
        "pack", metavar="PACK", type=Path, help="pack file to write, its fixture in fixtures/ beside it"
    )
    second.add_argument(
        "--rate", type=float, default=0.02, help="share of normal traffic that a category may flag (0.02)"
    )
    second.add_argument("--force", action="store_true", help="replace PACK, which nobody may use yet")
    second.set_defaults(run=fit_step)
    return whole


def score_step(draft: Pack, rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    if options.results.exists() and b'"asked"' not in options.results.read_bytes():
        raise Stop(f"{options.results} exists and was not written by this step: name another file")
    results = score_anywhere(draft, rows, options)
    texts = [{"text": row["text"]} for row in rows]
    kept = [result | text for result, text in zip(results, texts, strict=True)]
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps({"asked": asked(draft), "results": kept}), encoding="utf-8")


def fit_step(draft: Pack, rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    beside = options.pack.parent / "fixtures" / f"{draft.version}.json"
    if not 0 < options.rate < 1:
        raise Stop("--rate is between 0 and 1")
    for path in (options.pack, beside):
        if path.exists() and not options.force:
            raise Stop(
                f"{path} exists, and a published version never changes: give the draft a new version and the file a "
                "new name (or --force, while nobody uses it)"
            )
    results = read_results(options.results, draft, rows)
    pack = from_data(fit(dict(draft.data), rows, results, options.rate), str(options.pack))
    write_json(options.pack, pack.data)
    write_json(beside, fixture(pack, results[:4]))
    report(pack, rows, results)
    print(f"wrote {options.pack} and {beside}")


def score_anywhere(draft: Pack, rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    if options.url:
        return score(draft, rows, lambda body: post(f"{options.url.rstrip('/')}/v1/score", body, options.token))
    from spinf_serve import Engine  # loads torch

    def say(message: str) -> None:
        print(message, file=sys.stderr, flush=True)

    with Engine(draft.model.model, device=options.device, warmup="none", on_progress=say) as engine:
        return score(draft, rows, engine.score)


def post(url: str, body: dict[str, Any], token: str | None) -> Any:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        raise Stop(f"{url} answered {error.code}: {error.read(2000).decode(errors='replace')}") from None
    except OSError as error:
        raise Stop(f"{url} cannot be reached: {error}") from None


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

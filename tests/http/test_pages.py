"""Every route and every metric of the running code stands on its page, and no other does."""

import re
from pathlib import Path

from prometheus_client import Metric

from workers.frontend.metrics import Metrics
from workers.frontend.routes import PACK, PACK_PREFIX, ROUTES

DOCS = Path(__file__).resolve().parents[2] / "docs"


def table_after(page: str, title: str) -> list[list[str]]:
    """Cells of the first table under a heading, its two head lines left out."""
    text = (DOCS / page).read_text(encoding="utf-8").split(f"\n## {title}\n")[1]
    rows = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert rows
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in rows[0].splitlines()[2:]]


def test_every_route_is_documented() -> None:
    routes = {(method, path) for path, route in ROUTES.items() for method in route.methods}
    routes |= {(method, PACK_PREFIX + "{id}") for method in PACK.methods}
    documented = {
        pair for row in table_after("api.md", "Endpoints") for pair in re.findall(r"`([A-Z]+) (/\S+)`", row[0])
    }
    assert documented == routes


def test_open_routes_are_documented_as_open() -> None:
    anyone = {
        path
        for row in table_after("api.md", "Endpoints")
        if "anyone" in row[1]
        for path in re.findall(r"(/\w+)`", row[0])
    }
    assert anyone == {path for path, route in ROUTES.items() if route.open}


def labels_of(metric: Metric) -> set[str]:
    return {name for sample in metric.samples for name in sample.labels} - {"le"}


def test_every_metric_is_documented_with_kind_and_labels() -> None:
    families = {
        family.name + ("_total" if family.type == "counter" else ""): (family.type, labels_of(family))
        for family in Metrics("demo").registry.collect()
        if not family.name.startswith("process_")
    }
    rows = table_after("metrics.md", "Metrics")
    assert {row[0].strip("`"): (row[1], set(re.findall(r"`(\w+)`", row[2]))) for row in rows} == families

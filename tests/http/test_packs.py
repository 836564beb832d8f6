"""Packs on a running server: listing, download, every error code, spinf-client's moderation, refused starts."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from spinf_client import SpinfClient, SpinfError, pack, query, text
from spinf_client import packs as client_packs

from spinf_serve import packs
from spinf_serve.protocol.errors import STATUS_OF_CODE
from tests.base.packs.support import write_json, write_repository
from tests.support.packs import guarded, plain_pack, tiny_pack, use
from tests.support.server import QUESTION, ServerProcess, wait_for

MODEL = "snapshot"
"""What a server of the tiny checkpoint's directory calls its model."""
MODERATION = "spinf/moderation"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def moderation_pack() -> dict[str, Any]:
    """A pack as spinf-client's `moderate` asks for it: contexts `ai` and `forum`, no parameter."""
    contexts = {"ai": "A message to an assistant:\n{X}\n", "forum": "A post in a forum:\n{X}\n"}
    return tiny_pack(MODERATION, "1.0.0", model=MODEL, parameters={}, contexts=contexts)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("packs")
    loud = plain_pack("acme/loud", model=MODEL, scoring=plain_pack()["scoring"] | {"case_insensitive": True})
    listed = [tiny_pack(model=MODEL), tiny_pack(version="0.9", model=MODEL), plain_pack(model=MODEL), loud]
    write_repository(root, [*listed, tiny_pack("acme/foreign", model="another")])
    manifest = json.loads((root / "prompt-packs.json").read_bytes())
    manifest["packs"][0]["versions"].append({"version": "2.0", "status": "coming_soon"})
    soon = {"id": "acme/soon", "name": "Soon", "versions": [{"version": "1.0", "status": "coming_soon"}]}
    manifest["packs"].append(soon)
    write_json(root / "prompt-packs.json", manifest)
    return root


@pytest.fixture(scope="module")
def moderation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repository(tmp_path_factory.mktemp("spinf"), [moderation_pack()], namespace="spinf")


@pytest.fixture(scope="module")
def pack_server(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, repository: Path, moderation: Path
) -> Iterator[ServerProcess]:
    flags = ("--packs", str(repository), "--packs", str(moderation), "--packs-allow-namespace", "spinf")
    env = {"SPINF_OFFICIAL_PACKS": "1", "GITHUB_API_URL": "http://127.0.0.1:1"}
    env |= {"SPINF_PACKS_CACHE": str(tmp_path_factory.mktemp("cache"))}
    with ServerProcess(tiny_checkpoint, tmp_path_factory.mktemp("packed"), *flags, env=env) as running:
        yield running


def test_the_listing(pack_server: ServerProcess, repository: Path) -> None:
    found = pack_server.get("/v1/packs").json()
    assert [entry["id"] for entry in found["packs"]] == [
        *("acme/guard", "acme/plain", "acme/loud", "acme/soon"),
        MODERATION,
    ]
    guard, soon = found["packs"][0], found["packs"][3]
    assert (guard["version"], guard["versions"], guard["status"]) == ("1.0", ["1.0", "0.9"], "available")
    assert (guard["queries"], guard["prompts"], guard["source"]) == (3, 4, "folder:1")
    assert (soon["status"], soon["version"], soon["versions"]) == ("coming_soon", None, [])
    assert [source["source"] for source in found["sources"]] == ["official", "folder:1", "folder:2"]
    assert str(repository.parent) not in json.dumps(found)
    assert "pack acme/foreign 1.0 is for the model another: skipped" in pack_server.log


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("acme/guard", "acme-guard-1.0"),
        ("acme%2Fguard", "acme-guard-1.0"),
        ("acme/guard?version=0.9", "acme-guard-0.9"),
    ],
)
def test_a_pack_is_downloaded_as_it_stands(pack_server: ServerProcess, repository: Path, path: str, name: str) -> None:
    answer = pack_server.get(f"/v1/packs/{path}")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert answer.content == (repository / f"packs/{name}.json").read_bytes()


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("acme/none", "unknown_pack"),
        ("acme", "unknown_pack"),
        ("ACME/guard", "unknown_pack"),
        ("acme/guard/", "unknown_pack"),
        ("acme/foreign", "unknown_pack"),
        ("acme/guard?version=9", "unknown_pack_version"),
        ("acme/guard?version=", "unknown_pack_version"),
        ("acme/guard?version=2.0", "unknown_pack_version"),
        ("acme/soon", "unknown_pack_version"),
    ],
)
def test_downloads_that_do_not_exist(pack_server: ServerProcess, path: str, code: str) -> None:
    answer = pack_server.get(f"/v1/packs/{path}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, code)
    assert answer.json()["error"]["type"] == "not_found"


PACK_CODES: dict[str, tuple[Any, str]] = {
    "unknown_pack": (guarded(packs=[use("acme/none")]), "scoring.packs.0.id"),
    "pack_not_available": (guarded(packs=[use("acme/soon")]), "scoring.packs.0.id"),
    "unknown_pack_version": (guarded(packs=[use(version="9")]), "scoring.packs.0.version"),
    "unknown_category": (
        guarded(packs=[use(decision={"thresholds": {"x": 1}})]),
        "scoring.packs.0.decision.thresholds.x",
    ),
    "duplicate_id": (guarded(packs=[use(), use()]), "scoring.packs.1.id"),
    "pack_conflict": (guarded(packs=[use(), use("acme/plain")]), "scoring.packs.1.context"),
    "reserved_group": (guarded(queries=[QUESTION | {"group": "acme/guard@1.0"}]), "scoring.queries.0.group"),
    "pack_media_not_supported": (guarded([IMAGE]), "inputs.0.messages.0.content.0"),
    "invalid_field": (guarded(packs=[use(mode="max")]), "scoring.packs.0.mode"),
}


def test_every_pack_code_is_met() -> None:
    assert {code for code in STATUS_OF_CODE if "pack" in code or "category" in code} <= PACK_CODES.keys()


@pytest.mark.parametrize("code", PACK_CODES)
def test_pack_codes(pack_server: ServerProcess, code: str) -> None:
    body, param = PACK_CODES[code]
    answer = pack_server.post(body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code), answer.text
    assert answer.json()["error"]["param"] == param


def test_results_with_and_without_company(pack_server: ServerProcess) -> None:
    """Equal bits from the real engine: the pack alone and with questions, one input and 64, and the caller's scores."""
    texts = [f"Content {i} about billing and more." for i in range(64)]
    alone = [pack_server.post(guarded(t)).json()["results"][0]["packs"] for t in texts[:8]]
    together = pack_server.post(guarded(*texts)).json()["results"]
    joined = pack_server.post(guarded(*texts, queries=[QUESTION])).json()["results"]
    assert [result["packs"] for result in together[:8]] == alone
    assert [result["packs"] for result in joined] == [result["packs"] for result in together]
    wrapped = [f"Message from Ann (here):\n{t}\n" for t in texts]
    plain = guarded(*wrapped, queries=[QUESTION], packs=[])
    for entry in plain["inputs"]:
        del entry["parameters"]
    plain["scoring"]["case_insensitive"] = False
    mine = pack_server.post(plain).json()["results"]
    assert [result["queries"] for result in mine] == [result["queries"] for result in joined]


def test_the_raw_results_evaluate_to_the_entry(pack_server: ServerProcess, repository: Path) -> None:
    body = guarded("one", "two", packs=[use(include_queries=True)])
    local = packs.load(repository / "packs/acme-guard-1.0.json")
    for result in pack_server.post(body).json()["results"]:
        assert result["packs"] == [local.evaluate(result)]


@pytest.fixture
def client(pack_server: ServerProcess) -> Iterator[SpinfClient]:
    with SpinfClient(base_url=pack_server.url, model=MODEL, tries=1) as client:
        yield client


def test_the_clients_moderation_call(client: SpinfClient) -> None:
    one = client.moderate("Immigrants are vermin and should be thrown out.")
    assert one.version == "1.0.0"
    assert set(one.categories) == {"harm", "money"}
    assert one.decision["mode"] == "micro_layer"
    many = client.moderate([f"text {i}" for i in range(70)], context="forum", ids=[f"t{i}" for i in range(70)])
    assert len(many) == 70
    assert all(0 <= category.score <= 1 for result in many for category in result.categories.values())


def test_the_clients_decision_arguments(client: SpinfClient) -> None:
    top = client.moderate("hello", mode="max", threshold=0.0)
    assert (top.unsafe, top.decision["mode"]) == (True, "max")
    each = client.moderate("hello", mode="per_category", thresholds={"harm": 0.0, "money": None}, critical=[])
    assert each.flagged == ["harm"]
    with pytest.raises(SpinfError) as refused:
        client.moderate("hello", thresholds={"nope": 0.5})
    assert (refused.value.code, refused.value.param) == (
        "unknown_category",
        "scoring.packs.0.decision.thresholds.nope",
    )


def test_the_client_decides_again_to_the_same(client: SpinfClient) -> None:
    scored = client.moderate(
        "hello", include_queries=True, queries=[query("mine", " Is it?{?}", options=[" yes", " no"])]
    )
    file = client.get_pack(MODERATION, scored.version)
    again = scored.redecide(file)
    assert again.decision["score"] == pytest.approx(scored.decision["score"], abs=1e-6)
    for name, category in scored.categories.items():
        assert again.categories[name].score == pytest.approx(category.score, abs=1e-6)
        assert again.categories[name].flagged == category.flagged
    here = client.moderate("hello", pack_file=file)
    assert here.decision["score"] == pytest.approx(scored.decision["score"], abs=1e-6)
    assert client_packs.lock_of(file) == file["decision"]["micro_layer"]["lock"]


def test_the_client_scores_with_packs(client: SpinfClient) -> None:
    queries = [query("q", " Is it?{?}", options=[" yes", " no"])]
    out = client.score(content=[text("hello")], queries=queries, packs=[pack(MODERATION, context="forum")])
    assert out["results"][0]["packs"][0]["context"] == "forum"
    assert [found["id"] for found in client.list_packs()["packs"]][-1] == MODERATION


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--packs", "/nonexistent"), "no such folder"),
        (("--packs", "{moderation}"), "--packs-allow-namespace spinf"),
        (("--packs", "{broken}"), "answers: must be p or logprob"),
    ],
)
def test_a_bad_source_refuses_the_start(
    tiny_checkpoint: Path, tmp_path: Path, moderation: Path, flags: tuple[str, ...], words: str
) -> None:
    broken = write_repository(tmp_path / "broken", [tiny_pack(model=MODEL, answers="x")])
    places = {"moderation": moderation, "broken": broken}
    filled = [flag.format(**places) for flag in flags]
    server = ServerProcess(tiny_checkpoint, tmp_path, *filled, ready=False)
    assert server.start_and_fail() == 1
    assert words in server.log
    assert "Traceback" not in server.log


def test_an_unreachable_official_source_is_logged_and_the_server_starts(pack_server: ServerProcess) -> None:
    assert "pack source official cannot be reached" in pack_server.log
    assert "starting without the official packs" in pack_server.log
    sources = pack_server.get("/v1/packs").json()["sources"]
    assert next((source["source"], source["status"]) for source in sources) == ("official", "error")


def test_packs_survive_the_death_of_the_frontend_and_of_workers(pack_server: ServerProcess, repository: Path) -> None:
    """The new processes get what was loaded at the start, whatever became of the files."""
    before = pack_server.post(guarded("hello")).json()["results"]
    (repository / "packs/acme-guard-1.0.json").unlink()
    for role in ("frontend", "preprocess"):
        dead = pack_server.children(role)
        for pid in dead:
            os.kill(pid, signal.SIGKILL)
        count = len(dead)
        wait_for(lambda r=role, d=dead, n=count: len(set(pack_server.children(r)) - set(d)) == n, f"another {role}")
        pack_server.wait_ready()
        wait_for(lambda: pack_server.get("/v1/packs").status_code == 200, "the packs")
        assert pack_server.post(guarded("hello")).json()["results"] == before
        assert pack_server.get("/v1/packs/acme/guard").status_code == 200

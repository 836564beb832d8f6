"""Real clients against the running server: curl, the OpenAI SDK, spinf-client."""

import json
import shutil
import subprocess
from collections.abc import Iterator

import openai
import pytest
from spinf_client import SpinfClient, SpinfError, query, text

from tests.support.server import QUESTION, ServerProcess, body_of


def curl(*arguments: str, data: bytes | None = None) -> tuple[int, bytes]:
    """(status, body) of one curl call."""
    command = ["curl", "--silent", "--show-error", "--max-time", "30", "--write-out", "\n%{http_code}", *arguments]
    result = subprocess.run(command, input=data, capture_output=True, check=True, timeout=60)
    body, _, status = result.stdout.rpartition(b"\n")
    return int(status), body


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(open_server: ServerProcess) -> None:
    expected = open_server.post(body_of()).json()["results"]
    url = open_server.url + "/v1/score"
    status, body = curl(url, "--data-binary", "@-", data=json.dumps(body_of()).encode())
    assert (status, json.loads(body)["results"]) == (200, expected)
    chunked = ("--header", "Transfer-Encoding: chunked")
    status, body = curl(url, *chunked, "--data-binary", "@-", data=json.dumps(body_of()).encode())
    assert (status, json.loads(body)["results"]) == (200, expected)
    status, body = curl(url, "--data-binary", "@-", data=b"x" * 100_000)  # curl asks with Expect: 100-continue
    assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")
    status, body = curl(open_server.url + "/healthz", "--head")
    assert status == 405


@pytest.fixture
def sdk(open_server: ServerProcess) -> Iterator[openai.OpenAI]:
    """The OpenAI SDK as its users set it up."""
    with openai.OpenAI(base_url=open_server.url + "/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def test_openai_sdk(open_server: ServerProcess, sdk: openai.OpenAI) -> None:
    (model,) = sdk.models.list().data
    completion = sdk.chat.completions.create(
        model=model.id,
        messages=[{"role": "user", "content": "hello world"}],
        extra_body={"scoring": {"queries": [QUESTION]}},
    )
    assert completion.choices == []
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 0
    assert completion.model_extra is not None
    assert completion.model_extra["results"] == open_server.post(body_of()).json()["results"]


def test_openai_sdk_reads_the_errors(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.chat.completions.create(model="", messages=[{"role": "user", "content": "hi"}])
    assert refused.value.code in ("scoring_required", "model_not_served")
    with pytest.raises(openai.BadRequestError) as streamed:
        sdk.chat.completions.create(
            model=sdk.models.list().data[0].id,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            extra_body={"scoring": {"queries": [QUESTION]}},
        )
    assert (streamed.value.code, streamed.value.param) == ("invalid_field", "stream")
    with pytest.raises(openai.NotFoundError):
        sdk.embeddings.create(model="x", input="y")


def test_openai_sdk_with_a_token(closed_server: ServerProcess) -> None:
    with openai.OpenAI(base_url=closed_server.url + "/v1", api_key="access", max_retries=0) as good:
        assert len(good.models.list().data) == 1
    with (
        openai.OpenAI(base_url=closed_server.url + "/v1", api_key="wrong", max_retries=0) as bad,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        bad.models.list()
    assert refused.value.code == "invalid_token"


def test_spinf_client(open_server: ServerProcess) -> None:
    with SpinfClient(base_url=open_server.url, model=served(open_server)) as client:
        queries = [query("q", " Is it? Answer:{?}", options=[" yes", " no"])]
        out = client.score(content=[text("hello world")], queries=queries)
        assert out["results"] == open_server.post(body_of()).json()["results"]
        assert client.models()
        assert client.list_packs() in ([], {"packs": [], "sources": []})
        with pytest.raises(SpinfError) as refused:
            client.score(content=[text("hello world")], queries=[query("q", " Is it?", options=[" yes"])])
        assert (refused.value.status, refused.value.code) == (400, "invalid_template")
        assert refused.value.param == "scoring.queries.0.template"


def test_spinf_client_with_a_token(closed_server: ServerProcess) -> None:
    queries = [query("q", " Is it?{?}", options=[" yes", " no"])]
    model = served(closed_server, "access")
    with SpinfClient(base_url=closed_server.url, model=model, api_key="access") as client:
        assert client.score(content=[text("hello world")], queries=queries)["results"][0]["queries"][0]["id"] == "q"
    with (
        SpinfClient(base_url=closed_server.url, model=model, api_key="wrong", tries=1) as client,
        pytest.raises(SpinfError) as refused,
    ):
        client.score(content=[text("hello world")], queries=queries)
    assert (refused.value.status, refused.value.code) == (401, "invalid_token")


def served(server: ServerProcess, token: str = "none") -> str:
    """The id that the server's model goes by."""
    found: str = server.get("/v1/models", headers={"authorization": f"Bearer {token}"}).json()["models"][0]["id"]
    return found

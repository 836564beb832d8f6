"""The codec refuses what it does not know, and the queues keep their promises."""

import dataclasses
import os
import typing
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from spinf_serve.config import EngineConfig, FrontendConfig, PackFile, PreprocessConfig, ServedModel
from spinf_serve.plan import EngineInfo, ScorePlan, ScoreResult
from spinf_serve.wire import child, engine, frontend, preprocess, queues, supervisor
from spinf_serve.wire.codec import decode, encode
from spinf_serve.wire.errors import QueueFull, VersionMismatch, WireError
from spinf_serve.wire.fields import field_of
from spinf_serve.wire.registry import FOR_FRONTEND, FOR_ROLE, MESSAGES, PROTOCOL_VERSION

MODEL = ServedModel(
    *("id", "name", ("alias",), "requested", "gemma3", "lm_head", ("score",), (), "default", "base", "rev", "/snap")
)
INFO = EngineInfo("fp_0", "f32", True, "cpu", None, 1, 2, 3, {"torch": "2", "cuda": None}, 1.5)
I32, I64 = np.dtype(np.int32), np.dtype(np.int64)


def arrays(dtype: np.dtype[Any]) -> st.SearchStrategy[Any]:
    return hnp.arrays(dtype, st.integers(0, 40))


plans = st.builds(
    ScorePlan,
    tokens=arrays(I32),
    parents=arrays(I32),
    job_offsets=arrays(I64),
    prefix_lens=arrays(I32),
    read_rows=arrays(I32),
    col_offsets=arrays(I64),
    cols=arrays(I32),
    by_position=st.booleans(),
)
EXAMPLES: list[Any] = [
    child.Stop("why"),
    supervisor.Hello("engine-1", "engine", 1, "ipc://x"),
    supervisor.ChildReady("engine-1", INFO),
    supervisor.ChildReady("frontend-1"),
    supervisor.Progress("engine-1", "half"),
    supervisor.Fatal("engine-1", "no\nway", True),
    supervisor.Beat("engine-1", 0.25),
    supervisor.EngineStats("engine-1", {"a": 1, "b": [1.5, None]}, np.ones(3, np.float32), np.zeros(0, np.float32)),
    supervisor.DrainRequest("frontend-1", True),
    supervisor.InFlight("frontend-1", 3),
    frontend.Serving(phase="ready", info=INFO),
    frontend.FrontendSetup(FrontendConfig(MODEL, token="t"), "json", (3, 4), frontend.Serving()),
    frontend.Packs((PackFile("a/b", "1.0", True, b"{}" * 50_000), PackFile("a/b", "2.0", False, b"")), b"[]"),
    frontend.WorkerLost("preprocess-1"),
    frontend.Credit("preprocess-1", "ipc://y"),
    frontend.Answer("preprocess-1", "scr_0", 1, 200, None, None, {"inputs": 1}, b"{}" * 100_000),
    preprocess.Peers("ipc://f", ""),
    preprocess.PreprocessSetup(PreprocessConfig(MODEL), "text", preprocess.Peers("", "")),
    preprocess.Work("scr_0", 2, "score", False, None, 1.5, b"\x00\xff"),
    preprocess.CancelWork("scr_0"),
    preprocess.Scored("scr_0", 1, ScoreResult(np.array([np.nan, -1.0], np.float32), "fp_0")),
    preprocess.Unscored("scr_0", 1, "engine_error", "m", None, 3),
    engine.EngineSetup(EngineConfig(MODEL), "text"),
    engine.CancelJob("preprocess-1", "scr_0"),
    engine.WorkerGone("preprocess-1"),
    supervisor.Degraded("engine-1", "a leak"),
]


def same(a: Any, b: Any) -> bool:
    if dataclasses.is_dataclass(a) and not isinstance(a, type):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(a) is type(b) and bool(a == b)


def wired(message: Any) -> list[bytes]:
    return [bytes(frame) for frame in encode(message)]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_round_trip(message: Any) -> None:
    assert same(decode(wired(message)), message)


@settings(max_examples=50, deadline=None)
@given(plans)
def test_plans_round_trip(plan: ScorePlan) -> None:
    job = engine.ScoreJob("preprocess-1", "ipc://y", "scr_0", 1, plan)
    frames = encode(job)
    assert len(frames) == 1 + 7, "one raw frame for each array"
    assert same(decode(frames), job)


def test_every_message_is_in_the_examples_and_travels() -> None:
    assert {type(message) for message in EXAMPLES} | {engine.ScoreJob} == set(MESSAGES.values())
    assert all(message in MESSAGES.values() for role in FOR_ROLE.values() for message in role)
    assert len(MESSAGES) == len({message.__qualname__ for message in MESSAGES.values()})


def test_arrays_are_not_copied() -> None:
    values = np.arange(1000, dtype=np.float32)
    frame = encode(preprocess.Scored("scr_0", 1, ScoreResult(values, "fp_0")))[1]
    assert np.shares_memory(np.frombuffer(frame, np.float32), values)
    received = decode([encode(preprocess.Scored("scr_0", 1, ScoreResult(values, "fp_0")))[0], frame])
    assert np.shares_memory(received.result.logprobs, values)


def test_unaligned_frames_give_aligned_arrays() -> None:
    header, *frames = wired(engine.ScoreJob("w", "i", "r", 1, ScorePlan(*plan_arrays())))
    shifted = [memoryview(b"x" + frame)[1:] for frame in frames]
    plan = decode([header, *shifted]).plan
    received = [getattr(plan, field.name) for field in dataclasses.fields(plan)]
    arrays = [value for value in received if isinstance(value, np.ndarray)]
    assert len(arrays) == len(shifted)
    assert all(array.flags.aligned for array in arrays)


def plan_arrays() -> list[Any]:
    dtypes = (np.int32, np.int32, np.int64, np.int32, np.int32, np.int64, np.int32)
    return [np.arange(5, dtype=dtype) for dtype in dtypes]


def repacked(message: Any, change: Any) -> list[bytes]:
    header, *frames = wired(message)
    opened = msgpack.unpackb(header)
    change(opened)
    return [msgpack.packb(opened), *frames]


WORK = EXAMPLES[18]
SCORED = EXAMPLES[20]


@pytest.mark.parametrize(
    ("message", "change", "says"),
    [
        (WORK, lambda h: h.update(t="Nonsense"), "unknown message 'Nonsense'"),
        (WORK, lambda h: h["f"].pop("route"), "missing fields ['route']"),
        (WORK, lambda h: h["f"].update(more=1), "unknown fields ['more']"),
        (WORK, lambda h: h["f"].update(attempt="1"), "attempt: str where int was expected"),
        (WORK, lambda h: h["f"].update(attempt=True), "attempt: bool where int was expected"),
        (WORK, lambda h: h["f"].update(trusted=1), "trusted: int where bool was expected"),
        (WORK, lambda h: h["f"].update(route=None), "route: NoneType where str was expected"),
        (WORK, lambda h: h["f"].update(body=3), "body: a frame of 2 bytes where 3 were announced"),
        (WORK, lambda h: h["f"].update(body=-1), "body: the length of a byte string was expected"),
        (WORK, lambda h: h.update(f=[]), "list where the fields of Work were expected"),
        (WORK, lambda h: h.update(x=1), "a header that is not {v, t, f}"),
        (WORK, lambda h: h.pop("v"), "without a protocol version"),
        (
            SCORED,
            lambda h: h["f"]["result"].update(logprobs=["<f8", [1]]),
            "an array of '<f8' where '<f4' was expected",
        ),
        (
            SCORED,
            lambda h: h["f"]["result"].update(logprobs=["<f4", [3]]),
            "a frame of 8 bytes where 12 were announced",
        ),
        (SCORED, lambda h: h["f"]["result"].update(logprobs=["<f4", [-1]]), "an array header"),
        (SCORED, lambda h: h["f"]["result"].update(logprobs=["O", [2]]), "an array of 'O'"),
        (SCORED, lambda h: h["f"]["result"].update(logprobs=[1.0, 2.0]), "an array header"),
        (SCORED, lambda h: h["f"].update(result=None), "result: NoneType where"),
    ],
)
def test_bad_headers_are_refused(message: Any, change: Any, says: str) -> None:
    with pytest.raises(WireError) as refused:
        decode(repacked(message, change))
    assert says in str(refused.value)


def test_bad_frames_are_refused() -> None:
    header, body = wired(WORK)
    for frames, says in (
        ([], "without a header"),
        ([header], "its frame is missing"),
        ([header, body, b""], "more frames than arrays"),
        ([b"\xc1", body], "not msgpack"),
        ([header + b"x", body], "not msgpack"),
        ([b"\x01", body], "without a protocol version"),
    ):
        with pytest.raises(WireError, match=says):
            decode(frames)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=3))
def test_any_bytes_are_refused_and_nothing_else(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(frames)


def test_another_version_is_refused_by_name() -> None:
    hello = EXAMPLES[1]
    frames = repacked(hello, lambda h: h.update(v=PROTOCOL_VERSION + 1, f={"sender": "engine-7", "new": 1}))
    with pytest.raises(VersionMismatch) as refused:
        decode(frames)
    assert f"engine-7 speaks wire protocol version {PROTOCOL_VERSION + 1}, this process {PROTOCOL_VERSION}" in str(
        refused.value
    )


def test_messages_for_others_are_refused() -> None:
    with pytest.raises(WireError, match="does not take it"):
        decode(wired(WORK), FOR_FRONTEND)


@pytest.mark.parametrize(
    "bad",
    [
        preprocess.Work("r", 1, "score", False, None, 1.0, "text"),  # type: ignore[arg-type]
        preprocess.Work("r", 1.5, "score", False, None, 1.0, b""),  # type: ignore[arg-type]
        preprocess.Work("r", 2**70, "score", False, None, 1.0, b""),
        preprocess.Scored("r", 1, ScoreResult(np.zeros(2, np.float64), "f")),  # type: ignore[arg-type]
        preprocess.Scored("r", 1, ScoreResult([0.0], "f")),  # type: ignore[arg-type]
        supervisor.EngineStats("e", {1: 2}, np.zeros(0, np.float32), np.zeros(0, np.float32)),  # type: ignore[dict-item]
        supervisor.EngineStats("e", {"a": object()}, np.zeros(0, np.float32), np.zeros(0, np.float32)),
        MODEL,
    ],
)
def test_senders_cannot_send_nonsense(bad: Any) -> None:
    with pytest.raises(WireError):
        encode(bad)


def test_unknown_types_cannot_be_declared() -> None:
    for annotation in (set[int], complex, typing.Callable):
        with pytest.raises(TypeError):
            field_of(annotation)


def test_non_contiguous_and_big_endian_arrays_travel() -> None:
    values = np.arange(10, dtype=np.float32)[::2]
    received = decode(wired(preprocess.Scored("r", 1, ScoreResult(values, "f"))))
    assert received.result.logprobs.tolist() == values.tolist()


def open_inbox(path: Path) -> queues.Inbox:
    return queues.Inbox(str(path), FOR_ROLE["preprocess"])


def test_queue_keeps_order_and_unlinks_its_file(socket_dir: Path) -> None:
    path = socket_dir / "a.sock"
    inbox = open_inbox(path)
    outbox = queues.Outbox(inbox.address)
    for number in range(100):
        outbox.send(preprocess.CancelWork(str(number)))
    seen: list[str] = []
    while len(seen) < 100:
        assert inbox.poll(10)
        seen += [message.request_id for message in inbox.take()]
    assert seen == [str(number) for number in range(100)]
    assert not inbox.poll(0)
    outbox.close()
    inbox.close()
    assert not path.exists()


def test_bad_message_does_not_cost_the_next(socket_dir: Path) -> None:
    inbox = open_inbox(socket_dir / "a.sock")
    outbox = queues.Outbox(inbox.address)
    outbox._socket.send_multipart([b"garbage"])
    outbox.send(preprocess.CancelWork("good"))
    seen: list[Any] = []
    errors = 0
    while not seen:
        assert inbox.poll(10)
        try:
            seen += list(inbox.take())
        except WireError:
            errors += 1
    assert (errors, seen) == (1, [preprocess.CancelWork("good")])
    outbox.close()
    inbox.close()


def test_full_queue_is_said_and_nothing_blocks(socket_dir: Path) -> None:
    """Nobody listens: at the high-water mark the sender is told, and its end is not held up."""
    outbox = queues.Outbox(queues.ipc_address(str(socket_dir / "nobody.sock")))
    for _ in range(queues.HIGH_WATER_MARK):
        outbox.send(preprocess.CancelWork("x"))
    with pytest.raises(QueueFull):
        outbox.send(preprocess.CancelWork("x"))
    outbox.close()


def test_long_paths_are_refused_clearly() -> None:
    assert queues.ipc_address("/" + "x" * 105)
    with pytest.raises(WireError, match="107 bytes, at most 106 fit: choose a shorter --ipc-dir"):
        queues.ipc_address("/" + "x" * 106)
    with pytest.raises(WireError, match="at most 106"):
        queues.ipc_address("/" + "é" * 53)


def test_poll_wakes_for_a_descriptor(socket_dir: Path) -> None:
    inbox = open_inbox(socket_dir / "a.sock")
    fd = os.eventfd(1)
    assert not inbox.poll(10, fd)
    os.close(fd)
    inbox.close()

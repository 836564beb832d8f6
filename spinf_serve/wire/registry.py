"""The one table of message names, and the protocol version that every header carries."""

from typing import Any

from spinf_serve.wire import child, engine, frontend, preprocess, supervisor

PROTOCOL_VERSION = 2
"""Raise it with any change of a message's name, fields or types."""

FOR_SUPERVISOR = (
    supervisor.Hello,
    supervisor.ChildReady,
    supervisor.Progress,
    supervisor.Fatal,
    supervisor.Beat,
    supervisor.EngineStats,
    supervisor.Degraded,
    supervisor.DrainRequest,
    supervisor.InFlight,
)
FOR_FRONTEND = (
    child.Stop,
    frontend.FrontendSetup,
    frontend.Serving,
    frontend.Packs,
    frontend.WorkerLost,
    frontend.Credit,
    frontend.Answer,
    supervisor.EngineStats,  # passed on by the supervisor, for the metrics
)
FOR_PREPROCESS = (
    child.Stop,
    preprocess.PreprocessSetup,
    preprocess.Peers,
    preprocess.Work,
    preprocess.CancelWork,
    preprocess.Scored,
    preprocess.Unscored,
)
FOR_ENGINE = (child.Stop, engine.EngineSetup, engine.ScoreJob, engine.CancelJob, engine.WorkerGone)

MESSAGES: dict[str, type[Any]] = {
    message.__name__: message for message in (*FOR_SUPERVISOR, *FOR_FRONTEND, *FOR_PREPROCESS, *FOR_ENGINE)
}

FOR_ROLE = {
    "supervisor": FOR_SUPERVISOR,
    "frontend": FOR_FRONTEND,
    "preprocess": FOR_PREPROCESS,
    "engine": FOR_ENGINE,
}

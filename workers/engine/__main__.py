"""Entry of the engine process: `python -P -m workers.engine RUN_DIR`, started by the supervisor."""

import sys

from spinf_serve import logs
from spinf_serve.supervisor.member import CannotStart, Member, run_child
from spinf_serve.wire.engine import EngineSetup
from spinf_serve.wire.supervisor import Progress


def main(member: Member) -> None:
    """Import torch while the supervisor finds the model, load, warm up, work."""
    from workers.engine.engine import ScoringEngine
    from workers.engine.loop import EngineLoop

    setup = member.set_up(EngineSetup)
    logs.setup("engine", setup.log_format)

    def report(text: str) -> None:
        member.tell(Progress(member.name, text))

    try:
        engine = ScoringEngine.load(setup.config, on_progress=report)
        engine.warm_up(report)
    except (MemoryError, OSError, RuntimeError) as error:
        # Of these families, what stays as it is however often one starts: paths, rights, and ops that torch lacks here.
        if isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError | NotImplementedError):
            raise CannotStart(_reason(error)) from error
        raise  # memory, disk or device: a restart may help
    except Exception as error:
        raise CannotStart(_reason(error)) from error
    EngineLoop(member, engine).run()


def _reason(error: Exception) -> str:
    return f"the model cannot be loaded: {error}" if str(error) else f"the model cannot be loaded: {error!r}"


if __name__ == "__main__":
    sys.exit(run_child("engine", main))

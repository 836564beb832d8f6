"""Entry of the engine process: `python -P -m workers.engine RUN_DIR`, started by the supervisor."""

import logging
import sys

from spinf_serve import logs
from spinf_serve.refusal import StartRefused
from spinf_serve.supervisor.member import CannotStart, CannotStartNow, Member, run_child
from spinf_serve.wire.engine import EngineSetup
from spinf_serve.wire.supervisor import Progress

log = logging.getLogger(__name__)


def main(member: Member) -> None:
    """Import torch while the supervisor finds the model, load, warm up, work."""
    from workers.engine.engine import ScoringEngine
    from workers.engine.errors import NotNow
    from workers.engine.failures import is_unwritable
    from workers.engine.loop import EngineLoop

    setup = member.set_up(EngineSetup)
    logs.setup("engine", setup.log_format)

    def report(text: str) -> None:
        member.tell(Progress(member.name, text))

    try:
        engine = ScoringEngine.load(setup.config, on_progress=report)
        engine.warm_up(report)
    except StartRefused as error:
        raise CannotStart(_reason(error)) from error
    except NotNow as error:
        raise CannotStartNow(_reason(error)) from error
    except (MemoryError, OSError, RuntimeError) as error:
        # Of these families, what stays as it is however often one starts: paths, rights, full disks, and ops that torch
        # lacks here.
        lasting = isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError | NotImplementedError)
        if lasting or is_unwritable(error):
            raise CannotStart(_reason(error)) from error
        log.exception("the start failed")
        raise CannotStartNow(_reason(error)) from error  # memory, disk or device: a restart may help
    except Exception as error:
        log.exception("the start failed")
        raise CannotStart(_reason(error)) from error
    EngineLoop(member, engine).run()


def _reason(error: Exception) -> str:
    """The first line alone, torch adds advice for its developers; with its type where the text is no sentence."""
    said = str(error).partition("\n")[0] if isinstance(error, StartRefused | OSError | RuntimeError) else ""
    return f"the model cannot be loaded: {said or repr(error)}"


if __name__ == "__main__":
    sys.exit(run_child("engine", main))

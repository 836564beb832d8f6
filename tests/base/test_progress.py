"""How a long download is shown."""

import io

import pytest

from spinf_serve import progress


def test_sizes_are_in_the_units_of_disks() -> None:
    sizes = {0: "0 bytes", 999: "999 bytes", 1000: "1.0 kB", 12_345_678: "12.3 MB", 13_100_000_000: "13.1 GB"}
    assert {size: progress.size_text(size) for size in sizes} == sizes


def lines_of(monkeypatch: pytest.MonkeyPatch, total: float, *moves: tuple[float, float]) -> list[str]:
    """What is said for (time, bytes here)."""
    said: list[str] = []
    lines = progress.Lines(said.append, "a/b", every_s=10)
    for at, done in moves:
        monkeypatch.setattr("time.monotonic", lambda at=at: at)
        lines(int(done), int(total))
    return said


def test_lines_come_now_and_then_with_speed_and_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    said = lines_of(monkeypatch, 4e9, (100, 1e9), (105, 1.5e9), (110, 2e9), (115, 3e9), (121, 3e9), (140, 3e9))
    assert said == [
        "a/b: 2.0 GB of 4.0 GB (50 %), 100.0 MB/s, about 20 s left",
        "a/b: 3.0 GB of 4.0 GB (75 %), 90.9 MB/s, about 11 s left",
        "a/b: 3.0 GB of 4.0 GB (75 %), 0 bytes/s",
    ]


def test_what_an_earlier_run_brought_is_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    said = lines_of(monkeypatch, 10e9, (1, 9e9), (11, 9.1e9))
    assert said == ["a/b: 9.1 GB of 10.0 GB (91 %), 10.0 MB/s, about 90 s left"]


def test_a_terminal_gets_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = progress.Terminal()
    with progress.transfer(terminal, "a/b") as moved:
        moved(1_000_000, 4_000_000)
        terminal("a note")
        moved(4_000_000, 4_000_000)
    error = capsys.readouterr().err
    assert "a note" in error
    assert "a/b" in error
    assert "4.0/4.0 MB" in error


def test_a_pipe_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    say = progress.for_standard_error()
    with progress.transfer(say, "a/b") as moved:
        moved(1, 2)
        assert isinstance(moved, progress.Lines)
    say("a note")
    assert stream.getvalue() == "a note\n"

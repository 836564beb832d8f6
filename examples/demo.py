"""`make demo`: the main job on the demo model. Two questions about one message, in this process, on the CPU."""

import time
from typing import Any

from rich.console import Console
from rich.table import Table

from spinf_serve import Engine

CONTENT = "Customer support message:\nI was charged twice for September, please refund one of the charges."
REFUND = "\n\nIs the customer asking for a refund?\nAnswer:{?}"
TOPIC = "\n\nForward to the department of{?}"
REQUEST = {
    "messages": [{"role": "user", "content": CONTENT}],
    "scoring": {
        "queries": [
            {"id": "refund", "template": REFUND, "options": [" yes", " no"]},
            {
                "id": "topic",
                "template": TOPIC,
                "options": [" billing", " technical", " account", " shipping", " cancellation"],
            },
        ]
    },
}


def table(response: dict[str, Any]) -> Table:
    """One row per option: its share p, its share without the content (floor), and lift = p / floor."""
    rows = Table("question", "option")
    for title in ("p", "floor", "lift"):
        rows.add_column(title, justify="right")
    for query in response["results"][0]["queries"]:
        for combination in query["combinations"]:
            best = max(option["p"] for option in combination["options"])
            for number, option in enumerate(combination["options"]):
                p, floor = option["p"], option["floor_p"]
                lift = f"{p / floor:.2f}" if floor else "∞"
                style = "bold" if p == best else None
                question = query["id"] if number == 0 else ""
                rows.add_row(question, option["text"].strip(), f"{p:.3f}", f"{floor:.3f}", lift, style=style)
            rows.add_section()
    return rows


def main() -> None:
    """Load (the first time: convert) the model, score, print."""
    out, log = Console(), Console(stderr=True, style="dim")
    started = time.monotonic()

    def progress(message: str) -> None:
        log.print(f"{time.monotonic() - started:6.1f} s  {message}", highlight=False, markup=False, soft_wrap=True)

    progress("loading the demo model (Gemma 3 270M) on the CPU")
    # One small request: a warm-up at the full budget would take longer than the answer.
    with Engine("demo", device="cpu", warmup="none", on_progress=progress) as engine:
        progress("ready")
        begun = time.monotonic()
        response = engine.score(REQUEST)
        progress(f"scored in {(time.monotonic() - begun) * 1000:.0f} ms")
    out.print(f"\n{CONTENT}\n", highlight=False, markup=False)
    out.print(table(response))
    notes = (
        "p: share among the options. floor: the same question without the message. lift: p / floor.",
        "The demo model is a small base model with weak answers; docs/scores.md says how to read them.",
    )
    out.print(*notes, sep="\n", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()

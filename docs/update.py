"""Writes the generated parts of the documentation: `make docs`. The tests fail while a page is out of date."""

from pathlib import Path

from spinf_serve.settings.show import markdown_table

PAGE = Path(__file__).parent / "configuration.md"
BEGIN = "<!-- settings: begin (make docs writes this table from the declarations) -->\n"
END = "<!-- settings: end -->\n"


def with_table(page: str) -> str:
    """The page with the table of settings between its markers. ValueError where a marker is missing."""
    before, rest = page.split(BEGIN)
    _old, after = rest.split(END)
    return f"{before}{BEGIN}\n{markdown_table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

"""The template grammar and the order of combinations."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spinf_serve.templates import Combinations, Template, TemplateError, parse_template, product_size


@pytest.mark.parametrize(
    ("text", "template"),
    [
        ("{?}", Template(("",), (), "?")),
        ("Is it?{?}", Template(("Is it?",), (), "?")),
        ("How many:{n}", Template(("How many:",), (), "n")),
        ("Cost{$}", Template(("Cost",), (), "$")),
        ('Name "{*}"', Template(('Name "',), (), "*", '"')),
        ("Name {*}", Template(("Name ",), (), "*")),
        ("{*} }}{{", Template(("",), (), "*", " }{")),
        ("a{x}b{x}{y_1}c{?}", Template(("a", "b", "", "c"), ("x", "x", "y_1"), "?")),
        ("{{x}} {x}{{{?}", Template(("{x} ", "{"), ("x",), "?")),
        ("{{{x}}}{?}", Template(("{", "}"), ("x",), "?")),
        ("{{{{}}}}{?}", Template(("{{}}",), (), "?")),
        ("{{?}}{?}", Template(("{?}",), (), "?")),
        ("{N}{?}", Template(("", ""), ("N",), "?")),
        ("{1}{2}{3}{4}{5}{1}{?}", Template(("",) * 7, tuple("123451"), "?")),
    ],
)
def test_parsed(text: str, template: Template) -> None:
    assert parse_template(text) == template


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no slot",
        "{x}",
        "{?} ",
        "{?}{?}",
        "{n}{?}",
        "{?}{x}",
        "{*}{*}",
        "{*}{x}",
        "{*}\n",
        "{*} a\r",
        "{n}.",
        "{$}}}",
        "{{?}",
        "{?}}",
        "{?",
        "{",
        "}",
        "}{?}",
        "a } b{?}",
        "{a b}{?}",
        "{a-b}{?}",
        "{}{?}",
        "{ x}{?}",
        "{é}{?}",
        "{x{y}}{?}",
        "{\n}{?}",
        "{a}{b}{c}{d}{e}{f}{?}",
        "{??}",
        "{#}",
    ],
)
def test_refused(text: str) -> None:
    with pytest.raises(TemplateError):
        parse_template(text)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="{}?n*$ax_1 \n", max_size=24))
def test_a_template_reads_back_or_is_refused(text: str) -> None:
    try:
        template = parse_template(text)
    except TemplateError:
        return
    # Writing the parsed parts with escaped braces gives the text again.
    escaped = [literal.replace("{", "{{").replace("}", "}}") for literal in template.literals]
    names = ["{" + name + "}" for name in (*template.names, template.slot)]
    written = "".join(itertools.chain.from_iterable(zip(escaped, names, strict=True)))
    assert written + template.end.replace("{", "{{").replace("}", "}}") == text


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=8), st.text(max_size=8))
def test_values_are_inserted_literally(a: str, b: str) -> None:
    template = parse_template("{{{a}}}-{b}{a}:{?}")
    values = {"a": a, "b": b}
    assert template.fill(values) == "{" + a + "}-" + b + a + ":"
    assert template.filled_chars(values) == len(template.fill(values))


def test_a_value_is_not_scanned_for_braces() -> None:
    assert parse_template("{a}{b}:{?}").fill({"a": "{b}", "b": "{{?}}"}) == "{b}{{?}}:"


def test_long_templates_parse_in_linear_time() -> None:
    assert len(parse_template("{{" * 300_000 + "{?}").literals[0]) == 300_000


def test_the_last_name_varies_fastest() -> None:
    rows = list(Combinations(axes={"b": ["1", "2"], "a": ["x", "y", "z"]}))
    assert [(row["b"], row["a"]) for row in rows] == list(itertools.product("12", "xyz"))
    assert list(rows[0]) == ["b", "a"]
    assert len(Combinations(axes={"b": ["1", "2"], "a": ["x", "y", "z"]})) == 6
    assert product_size({}) == 1
    assert list(Combinations(axes={})) == [{}]
    assert len(Combinations(rows=[{"a": "1"}, {"a": "1"}])) == 2

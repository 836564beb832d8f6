"""Contexts: the text that stands before and after each content, with the caller's parameters in it."""

import re
from collections.abc import Mapping
from typing import Any

from spinf_serve.packs.model import Context, PackModel, Parameter

CONTENT = "X"
NAME = re.compile(r"[A-Za-z0-9_]+", re.ASCII)
_PIECE = re.compile(r"\{([A-Za-z0-9_]+)\}", re.ASCII)

Parts = list[dict[str, Any]]


def split_context(name: str, template: str, parameters: Mapping[str, Any]) -> Context:
    """A context template, split at its one `{X}`. Raises `ValueError` saying what is wrong with it.

    There are no escapes: a brace that belongs to no placeholder is refused, so that nobody has to guess its meaning.
    """
    pieces: list[str | tuple[str]] = []
    at = 0
    for match in _PIECE.finditer(template):
        pieces += [template[at : match.start()], (match.group(1),)]
        at = match.end()
    pieces.append(template[at:])
    if any("{" in piece or "}" in piece for piece in pieces if isinstance(piece, str)):
        raise ValueError("holds a brace that is part of no placeholder")
    names = [piece[0] for piece in pieces if isinstance(piece, tuple)]
    if names.count(CONTENT) != 1:
        raise ValueError("must hold {X} exactly once")
    for placeholder in names:
        if placeholder != CONTENT and placeholder not in parameters:
            raise ValueError(f"{{{placeholder[:64]}}} is no parameter of the pack")
    middle = pieces.index((CONTENT,))
    return Context(name, template, tuple(filter(None, pieces[:middle])), tuple(filter(None, pieces[middle + 1 :])))


class ParameterFault(ValueError):
    """A parameter that is missing, unknown or no string; `name` is its name."""

    def __init__(self, name: str, message: str) -> None:
        self.name, self.message = name, message
        super().__init__(f"parameter {name[:64]}: {message}")


def parameter_texts(parameters: Mapping[str, Parameter], given: Mapping[str, Any]) -> dict[str, str]:
    """The text of every parameter: given, or its default, or empty where it is optional. Raises `ParameterFault`."""
    for name, value in given.items():
        if name not in parameters:
            raise ParameterFault(name, "the pack has no such parameter")
        if not isinstance(value, str):
            raise ParameterFault(name, "must be a string")
    texts = {}
    for name, parameter in parameters.items():
        if name in given:
            texts[name] = given[name]
        elif parameter.default is not None or not parameter.required:
            texts[name] = parameter.default or ""
        else:
            raise ParameterFault(name, "the pack requires this parameter")
    return texts


def wrap_texts(pack: PackModel, context: str | None, given: Mapping[str, Any]) -> tuple[str, str]:
    """The text before and the text after a content. Values are inserted as they are, never scanned for braces."""
    name = pack.default_context if context is None else context
    if name not in pack.contexts:
        raise ValueError(f"{pack.id} has no context {name[:64]!r}; contexts: {', '.join(pack.contexts)}")
    texts = parameter_texts(pack.parameters, given)
    return filled(pack.contexts[name].before, texts), filled(pack.contexts[name].after, texts)


def filled(pieces: tuple[str | tuple[str], ...], texts: Mapping[str, str]) -> str:
    """One side of a context with its parameters inserted."""
    return "".join(piece if isinstance(piece, str) else texts[piece[0]] for piece in pieces)


def wrapped(before: str, content: str | Parts, after: str) -> Parts:
    """The content parts of a message: the text before, the content, the text after; empty texts are left out."""
    middle = [_text(content)] if isinstance(content, str) else [dict(part) for part in content]
    parts = [_text(before), *middle, _text(after)]
    return [part for part in parts if part != _text("")] or [_text("")]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}

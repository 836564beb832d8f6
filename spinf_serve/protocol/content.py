"""The content of an input: messages and their parts, joined to one text."""

import re
from collections.abc import Callable
from typing import Any

from spinf_serve.protocol.document import Faults, Fields, Place

MESSAGE_JOINER = "\n\n"

_DETAILS = ("low", "auto", "high")
_REMOTE = re.compile(r"\s*([a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
_KINDS = {"image_url": "image", "input_audio": "audio", "video": "video"}
_MAX_TIME = 1e9
"""Seconds: a bound for a frame's time that no video reaches."""


Refused = Callable[[str], str | None]
"""Why a media kind (image, audio, video) is refused beside what the model reads, or None."""


def no_kind_refused(kind: str) -> None:
    """Leaves every kind to the model."""


def read_messages(messages: list[Any], place: Place, faults: Faults, refused: Refused = no_kind_refused) -> str:
    """The text of a message list; a faulty message contributes what is readable of it.

    Roles are accepted and not rendered. Text parts of one message are joined as they are, messages by a blank line.
    `refused` says which media kinds the call's packs do not read.
    """
    if not messages:
        faults.add(place, "invalid_field", "must hold at least one message")
    return MESSAGE_JOINER.join(_message(message, place.item(i), faults, refused) for i, message in enumerate(messages))


def _message(message: Any, place: Place, faults: Faults, refused: Refused) -> str:
    if not isinstance(message, dict):
        faults.add(place, "invalid_field", "must be an object")
        return ""
    fields = Fields(message, place, faults)
    fields.string("role")
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        fields.fault("content", "must be a string or a list of parts" if "content" in fields else "missing")
        return ""
    at = fields.place("content")
    return "".join(_part(part, at.item(i), faults, refused) for i, part in enumerate(content))


def _part(part: Any, place: Place, faults: Faults, refused: Refused) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        return Fields(part, place, faults).string("text", required=True) or ""
    read = _MEDIA.get(kind) if isinstance(kind, str) else None
    if read is None:
        faults.add(place, "unsupported_content", "must be a text, image_url, input_audio or video part")
    else:
        fields = Fields(part, place, faults)
        read(fields)
        if message := refused(_KINDS[str(kind)]):
            faults.add(place.end(), "pack_media_not_supported", message)
        faults.add(place.end(), "media_not_supported", f"the served model does not read {kind} parts")
    return ""


def _image(fields: Fields) -> None:
    image = fields.object("image_url", required=True)
    if image is None:
        return
    url = image.string("url", required=True)
    _detail(image)
    if url is not None and _REMOTE.match(url):
        message = "remote URLs are not fetched: send the image as a data: URL"
        fields.faults.add(fields.at, "unsupported_content", message)


def _detail(fields: Fields) -> None:
    detail = fields.string("detail")
    if detail is not None and detail not in _DETAILS:
        fields.fault("detail", "must be low, auto or high")


def _audio(fields: Fields) -> None:
    audio = fields.object("input_audio", required=True)
    if audio is not None:
        audio.string("data", required=True)
        audio.string("format", required=True)


def _video(fields: Fields) -> None:
    video = fields.object("video", required=True)
    if video is None:
        return
    _detail(video)
    frames = video.items("frames", required=True)
    if frames is None:
        return
    at = video.place("frames")
    if not frames:
        fields.faults.add(at, "invalid_field", "must hold at least one frame")
    for i, frame in enumerate(frames):
        if not isinstance(frame, dict):
            fields.faults.add(at.item(i), "invalid_field", "must be an object")
            continue
        frame_fields = Fields(frame, at.item(i), fields.faults)
        frame_fields.number("t", 0, _MAX_TIME, required=True)
        _image(frame_fields)


_MEDIA: dict[str, Callable[[Fields], None]] = {"image_url": _image, "input_audio": _audio, "video": _video}

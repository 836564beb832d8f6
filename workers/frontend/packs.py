"""Pack files for download. Plain functions."""

from collections.abc import Sequence

from spinf_serve.config import PackFile
from spinf_serve.protocol.errors import RequestError


def pack_content(files: Sequence[PackFile], pack_id: str, version: str | None) -> bytes:
    """The file of a pack's version, or of its default one. Raises `RequestError` (404) where there is none."""
    versions = [file for file in files if file.id == pack_id]
    if not versions:
        raise RequestError("unknown_pack", "this server has no such pack", status=404)
    for file in versions:
        if file.content and (file.version == version if version is not None else file.default):
            return file.content
    raise RequestError("unknown_pack_version", "this server has no such version of the pack", status=404)

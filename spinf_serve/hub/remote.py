"""What the Hub says: the commit of a branch, the files of a commit, their lengths. Runs in the download process.

huggingface_hub (imported late) brings the client, the token, the proxies and the meaning of the answers.
"""

import itertools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spinf_serve.hub.cache import HEAD, wanted
from spinf_serve.hub.failures import Refused, is_transient, keep_secret, retry_after, status_of

_ETAG = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}", re.ASCII)
_MOST_FILES = 100_000  # no repository of a model has more; a listing whose pages lead to each other has no end
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a commit. `size` in bytes; None where the Hub does not say."""

    name: str
    url: str
    etag: str
    size: int | None


class Patience:
    """Waits longer and longer between tries; the error itself comes out once the waits are used up."""

    def __init__(self, waits_s: Sequence[float], note: Callable[[str], None]) -> None:
        self._waits_s = waits_s
        self._note = note
        self._tries = 0

    def reset(self) -> None:
        """Something arrived: the next failure is the first again."""
        self._tries = 0

    def wait(self, error: Exception, what: str) -> None:
        """Wait before the next try, or raise `error`: it is not transient, or was the last one."""
        if not is_transient(error) or self._tries == len(self._waits_s):
            raise error
        wait_s = max(self._waits_s[self._tries], retry_after(error))
        self._tries += 1
        self._note(f"{what}, trying again in {wait_s:.0f} s")
        time.sleep(wait_s)


class Remote:
    """A repository on the Hub. Raises huggingface_hub's and httpx's errors, and `Refused`."""

    def __init__(
        self, repo: str, waits_s: Sequence[float], note: Callable[[str], None], endpoint: str | None = None
    ) -> None:
        """`endpoint`: another Hub than huggingface.co."""
        from huggingface_hub import HfApi
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        self._repo, self._waits_s, self._note = repo, waits_s, note
        self._api = HfApi(endpoint=endpoint, library_name="spinf-serve")
        self.headers: dict[str, str] = build_hf_headers(library_name="spinf-serve")
        self.has_token = "authorization" in self.headers
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        if token:
            keep_secret(token)
        if not all("!" <= character <= "~" for character in token):
            raise Refused("the token of HF_TOKEN holds characters that no token has: check it for spaces and quotes")

    def head(self) -> str:
        """The commit of the default branch."""
        commit = self._patiently(lambda: self._api.model_info(self._repo, revision=HEAD)).sha
        if commit is None or not _COMMIT.fullmatch(commit):
            raise Refused(f"the Hub names no commit for the default branch of {self._repo}")
        return str(commit)

    def listing(self, revision: str) -> tuple[list[str], dict[str, dict[str, Any]] | None]:
        """Names of a commit's files, and their entries for `Store.write_listing` where the Hub gives them."""
        try:
            tree = self._patiently(lambda: self._tree(revision))
            entries = {file.path: _entry(file) for file in tree if hasattr(file, "blob_id")}
            return list(entries), entries
        except Exception as error:
            # A mirror of the Hub may know the older call only.
            if not (isinstance(error, KeyError | TypeError) or status_of(error) in (404, 405, 501)):
                raise
            info = self._patiently(lambda: self._api.model_info(self._repo, revision=revision))
            return [sibling.rfilename for sibling in info.siblings or ()], None

    def _tree(self, revision: str) -> list[Any]:
        """What the Hub lists for a commit, page by page."""
        pages = self._api.list_repo_tree(self._repo, recursive=True, revision=revision)
        tree = list(itertools.islice(pages, _MOST_FILES + 1))
        if len(tree) > _MOST_FILES:
            raise Refused(
                f"the Hub lists more than {_MOST_FILES} files for {self._repo}: check HF_ENDPOINT and the proxy, or "
                "give a local snapshot with --model-dir DIR"
            )
        return tree

    def file(self, revision: str, name: str) -> RemoteFile:
        """What the Hub says of one file. `Refused` where it answers for another commit."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        url = hf_hub_url(self._repo, name, revision=revision, endpoint=self._api.endpoint)
        found = self._patiently(lambda: get_hf_file_metadata(url, headers=self.headers))
        if found.commit_hash is None or found.etag is None:
            raise Refused(
                f"{url} is answered by something that is not the Hub (no commit or no ETag): check HF_ENDPOINT and "
                "the proxy"
            )
        if found.commit_hash != revision:
            raise Refused(f"the Hub answers with revision {found.commit_hash} of {self._repo}, {revision} is needed")
        if not _ETAG.fullmatch(found.etag):
            raise Refused(f"the Hub names the content of {name} in a way that cannot be a file name")
        return RemoteFile(name, url, found.etag, found.size)

    def _patiently[T](self, call: Callable[[], T]) -> T:
        patience = Patience(self._waits_s, self._note)
        while True:
            try:
                return call()
            except Exception as error:
                patience.wait(error, f"the Hub does not answer for {self._repo}")


def wanted_files(names: list[str]) -> list[str]:
    """Those that belong to a snapshot: weights last, so that they cannot make an incomplete snapshot look whole."""
    return sorted(filter(wanted, names), key=lambda name: (name.endswith(".safetensors"), name))


def _entry(file: Any) -> dict[str, Any]:
    """One file of a listing, as huggingface_hub records it."""
    entry: dict[str, Any] = {"size": file.size, "blob_id": file.blob_id}
    if file.lfs is not None:
        entry |= {"lfs_sha256": file.lfs.sha256, "lfs_size": file.lfs.size}
    if file.xet_hash is not None:
        entry["xet_hash"] = file.xet_hash
    return entry

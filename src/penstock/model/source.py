"""Where a model's files are: the embedded demo, a directory, a GGUF file, or the Hub.

Everything ends as a local directory, so that there is one way to read a model. Files of a Hub model are fetched into
Hugging Face's own cache by name: root level only (some repositories carry the same weights three times in folders), and
never pickles. Whether the Hub can be reached is asked once with a short timeout; the libraries' own retries would keep
the user waiting for half a minute before saying no.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from penstock.errors import ModelError

_TIMEOUT_S = 5.0
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SMALL = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
"""Endings of everything but weights: configs, tokenizers, templates, and code for those who asked to run it."""


@dataclass(frozen=True)
class Source:
    """A directory of Hugging Face files, or one GGUF file in a directory."""

    directory: Path
    gguf_file: str | None = None

    @property
    def gguf(self) -> dict[str, str]:
        """The keyword argument that transformers takes a GGUF file by."""
        return {"gguf_file": self.gguf_file} if self.gguf_file else {}


def find_source(name: str, revision: str | None = None, *, weights: bool = False, flag: str = "--model") -> Source:
    """The model's files on this machine; a Hub model is fetched first, its weights only when asked for.

    `flag`: what the name was given to.
    """
    if name == "demo":
        return Source(_demo_directory())
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError("no such GGUF file", where=name, remedy=f"Check the path given to {flag}.")
        return Source(path.parent, path.name)
    if path.is_dir():
        return Source(path)
    if path.exists():
        raise ModelError("is a file, but not a GGUF file", where=name, remedy="Give its directory, or a .gguf file.")
    if not _HUB_NAME.fullmatch(name) or name.startswith("."):
        raise ModelError("no such directory", where=name, remedy=f"Check the path given to {flag}.")
    return Source(_fetch(name, revision, weights=weights))


def is_local(name: str) -> bool:
    """Whether `name` needs no Hub."""
    return name == "demo" or Path(name).expanduser().exists()


def _demo_directory() -> Path:
    directory = Path(str(resources.files("penstock"))) / "demo" / "model"
    if not directory.is_dir():
        what = "the embedded demo model is missing from this installation"
        raise ModelError(what, where=str(directory), remedy="Install penstock again.")
    return directory


def _fetch(name: str, revision: str | None, *, weights: bool) -> Path:
    """A snapshot directory of a Hub model in the cache."""
    if constants.HF_HUB_OFFLINE:
        return _cached(name, revision, "HF_HUB_OFFLINE is set")
    try:
        info = HfApi().model_info(name, revision=revision, timeout=_TIMEOUT_S)
        files = _wanted([s.rfilename for s in info.siblings or ()], weights=weights)
        # By the revision's own name, not its commit: the cache finds it again under the name it was fetched by.
        return Path(snapshot_download(name, revision=revision, allow_patterns=files, etag_timeout=_TIMEOUT_S))
    except (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise _refused(name, revision, error) from None
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code in (401, 403):
            raise _refused(name, revision, error) from None
        return _cached(name, revision, f"it answered {str(error).splitlines()[0]}")
    except LocalEntryNotFoundError as error:
        return _cached(name, revision, str(error).splitlines()[0])
    except Exception as error:  # the HTTP library's own errors; which library that is differs between versions
        if not (isinstance(error, OSError) or type(error).__module__.startswith("httpx")):
            raise
        return _cached(name, revision, str(error) or type(error).__name__)


def _wanted(files: Sequence[str], *, weights: bool) -> list[str]:
    """Names at the root level: small files, and safetensors where weights are wanted."""
    endings = (*_SMALL, ".safetensors") if weights else _SMALL
    return [name for name in files if "/" not in name and name.endswith(endings)]


def _cached(name: str, revision: str | None, reason: str) -> Path:
    """What an earlier run has fetched, or an error that names what works without the Hub."""
    for file in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        path = try_to_load_from_cache(name, file, revision=revision)
        if isinstance(path, str):
            return Path(path).parent
    raise ModelError(
        f"the Hub cannot be reached ({reason}), and there is no copy in its cache, {constants.HF_HUB_CACHE}",
        where=name,
        remedy="Without the Hub: --model PATH to a directory or .gguf file, HF_HOME set to a cache that has the model, "
        "or --model demo. For shapes without weights: --init random.",
    )


def _refused(name: str, revision: str | None, error: HfHubHTTPError) -> ModelError:
    """The Hub answered, and the answer is no."""
    token = "HF_TOKEN is set" if os.environ.get("HF_TOKEN") else "HF_TOKEN is not set"
    if isinstance(error, RevisionNotFoundError):
        return ModelError(f"has no revision {revision!r}", where=name, remedy="Check --revision.")
    if isinstance(error, GatedRepoError):
        remedy = f"Accept its terms on https://huggingface.co/{name}, then set HF_TOKEN to your access token ({token})."
        return ModelError("the Hub gives this model only to users who accepted its terms", where=name, remedy=remedy)
    remedy = f"Check the name. If the model is private, set HF_TOKEN to an access token that may read it ({token})."
    return ModelError("no such model on the Hub, or no permission to read it", where=name, remedy=remedy)

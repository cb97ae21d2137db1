"""Fetch a checkpoint from the Hugging Face hub, or take it from the local cache.

Everything about caching, resuming, tokens and offline mode is huggingface_hub's own behaviour
(`HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE`); here its errors get one clear sentence.
"""

from __future__ import annotations

import re
from pathlib import Path

from quantload.errors import SourceNotFound

_PART = r"[A-Za-z0-9_][\w.-]*"  # `./model` and `../model` are paths
_HUB_ID = re.compile(rf"(?P<repo>{_PART}/{_PART})(@(?P<revision>[\w./-]+))?", re.ASCII)
_CACHED = re.compile(
    r"/models--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+)/snapshots/(?P<commit>[0-9a-f]{40})\Z",
    re.ASCII,
)
_WANTED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.md", "*.tiktoken"]
_WANTED += ["LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*"]
_PICKLED = ["*.bin", "*.bin.index.json", "*.pt", "*.pth"]
_UNWANTED = ["original/*", "metal/*", "onnx/*", "consolidated*", "*.gguf"]
_UNWANTED += ["optimizer*", "training_args*", "scheduler*", "rng_state*"]


def is_hub_id(text: str) -> bool:
    """True if `text` reads like OWNER/NAME or OWNER/NAME@REVISION."""
    return _HUB_ID.fullmatch(text) is not None


def fetch_snapshot(hub_id: str, *, pickled: bool = False) -> Path:
    """Return the local folder of a hub repository, downloading what is not cached.

    Args:
        hub_id: OWNER/NAME, or OWNER/NAME@REVISION with a branch, tag or commit.
        pickled: Fetch pickled weights too, for a repository that has no others.

    Raises:
        SourceNotFound: No such repository or revision, no access, no connection.
    """
    from huggingface_hub import is_offline_mode, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    match = _HUB_ID.fullmatch(hub_id)
    assert match is not None, f"`{hub_id}` is not a hub id"
    repo, revision = match["repo"], match["revision"]
    at_revision = f"`{repo}`" + (f" at `{revision}`" if revision else "")
    # What goes wrong on the way is an error of the HTTP library or of the system.
    transport: tuple[type[BaseException], ...] = HfHubHTTPError.__bases__
    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=_WANTED + (_PICKLED if pickled else []),
            ignore_patterns=_UNWANTED,
            local_files_only=is_offline_mode(),  # huggingface_hub 1.33 asks for commits otherwise
        )
    except GatedRepoError as error:
        raise SourceNotFound(
            f"access to `{repo}` is gated: {error}",
            hint=f"accept its terms on https://huggingface.co/{repo}, then run `hf auth login`",
        ) from error
    except RevisionNotFoundError as error:
        raise SourceNotFound(f"`{repo}` has no revision `{revision}`") from error
    except RepositoryNotFoundError as error:
        raise SourceNotFound(
            f"no folder and no hub repository is called `{repo}`",
            hint="check the name; for a private repository run `hf auth login` first",
        ) from error
    except HFValidationError as error:
        raise SourceNotFound(f"neither a folder nor a hub id: `{hub_id}`; {error}") from error
    except LocalEntryNotFoundError as error:
        raise SourceNotFound(
            f"{at_revision} is no folder, not in the hub cache, and the hub cannot be reached",
            hint="check the path or the connection; `HF_HUB_OFFLINE=1` allows cached files only",
        ) from error
    except transport as error:
        raise SourceNotFound(f"{at_revision} cannot be fetched from the hub: {error}") from error
    return Path(folder)


def hub_origin(folder: Path) -> tuple[str, str] | None:
    """Return the repository OWNER/NAME and the commit that a folder of the hub cache holds.

    Args:
        folder: `.../models--OWNER--NAME/snapshots/COMMIT`, as huggingface_hub lays out its cache.

    Returns:
        None for any other folder.
    """
    match = _CACHED.search(folder.absolute().as_posix())
    return (f"{match['owner']}/{match['name']}", match["commit"]) if match else None

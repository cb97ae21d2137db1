"""Upload a finished output to the Hugging Face hub.

Transfers, retries and tokens are huggingface_hub's own (`HF_TOKEN`, `hf auth login`,
`HF_ENDPOINT`): what the hub has already is not sent again, so that a second call continues a broken
one. Here is decided what may be uploaded, and each error gets one clear sentence.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from quantload import __version__
from quantload.errors import CheckpointError, ConfigError, UploadError, listed
from quantload.loader.hub import is_hub_id
from quantload.loader.manifest import MANIFEST, check_files, read_manifest
from quantload.loader.open import QUANTIZATION_SIDE_FILES
from quantload.progress import Progress

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def check_push(repo: str) -> None:
    """Check, before anything is computed, that an upload can succeed: name, token, connection.

    Args:
        repo: OWNER/NAME.

    Raises:
        ConfigError: Not the name of a repository.
        UploadError: No token, a token that the hub refuses, offline mode, or no connection.
    """
    api = _api(repo)
    with _explained(repo):
        api.whoami()


def push_folder(
    folder: Path,
    repo: str,
    *,
    private: bool = False,
    threads: int = 1,
    progress: Progress | None = None,
    quiet: bool = False,
) -> str:
    """Upload a finished output; its files must be as its manifest says.

    Args:
        folder: What a conversion wrote.
        repo: OWNER/NAME of a model repository; it is made if it does not exist.
        private: Make it private; refused for one that exists and is public.
        threads: Files that are hashed at a time.
        progress: Advances while files are hashed.
        quiet: Leave out huggingface_hub's own progress bars.

    Returns:
        Address of the commit.

    Raises:
        ConfigError: Not the name of a repository.
        UploadError: The folder is not a finished output, the repository does not take it, or the
            hub cannot be reached.
    """
    api = _api(repo)
    _check_finished(folder, threads, progress)
    with _explained(repo), _bars(quiet=quiet):
        api.create_repo(repo, private=True if private else None, exist_ok=True)
        if private and not api.repo_info(repo).private:
            raise UploadError(
                f"`{repo}` exists and is public, but a private repository was asked for",
                hint="make it private in its settings on the hub, or give another name",
            )
        _refuse_strangers(folder, repo, api.list_repo_files(repo))
        names = [*read_manifest(folder)["files"], MANIFEST]
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            allow_patterns=[glob.escape(name) for name in names],
            commit_message=f"Upload with quantload {__version__}",
        )
        _check_arrived(folder, repo, api)
    return str(commit.commit_url)


@contextmanager
def _bars(*, quiet: bool) -> Iterator[None]:
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if not quiet or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _api(repo: str) -> HfApi:
    from huggingface_hub import HfApi, get_token, is_offline_mode

    if not is_hub_id(repo) or "@" in repo:
        raise ConfigError(
            f"not the name of a repository: `{repo}`, expected `OWNER/NAME`",
            hint="an upload goes to the main branch",
        )
    if is_offline_mode():
        raise UploadError(
            f"cannot upload to `{repo}`: huggingface_hub is in offline mode",
            hint="unset `HF_HUB_OFFLINE`",
        )
    if get_token() is None:
        raise UploadError(
            f"cannot upload to `{repo}`: there is no token",
            hint="run `hf auth login`, or set `HF_TOKEN`, with a token that may write",
        )
    return HfApi(library_name="quantload", library_version=__version__)


def _check_finished(folder: Path, threads: int, progress: Progress | None) -> None:
    try:
        found = check_files(folder, threads=threads, progress=progress)
    except CheckpointError as error:
        raise UploadError(
            f"`{folder}` is not a finished output: {error.message}",
            hint="convert again; unfinished outputs are continued by the same command",
        ) from error
    if not found.passed:
        raise UploadError(
            f"`{folder}` is not as it was written: {'; '.join(found.problems[:5])}"
            + (f"; and {len(found.problems) - 5} more" if len(found.problems) > 5 else ""),
            hint="convert again, or move away what was added",
        )


def _refuse_strangers(folder: Path, repo: str, remote: list[str]) -> None:
    """Refuse a repository with weights that readers would take for a part of this model.

    Raises:
        UploadError: It holds some.
    """
    ours = read_manifest(folder)["files"]
    strangers = [
        name
        for name in remote
        if name not in ours
        and (name.endswith(_WEIGHTS) or PurePosixPath(name).name in QUANTIZATION_SIDE_FILES)
    ]
    if strangers:
        raise UploadError(
            f"`{repo}` holds files of another checkpoint, which engines would read too: "
            f"{listed(strangers)}",
            hint="give the name of a new repository, or delete these files on the hub",
        )


def _check_arrived(folder: Path, repo: str, api: HfApi) -> None:
    """Compare what the hub lists with the manifest.

    Raises:
        UploadError: A file is missing there, or is another one.
    """
    from huggingface_hub.hf_api import RepoFile

    remote = {
        f.path: f for f in api.list_repo_tree(repo, recursive=True) if isinstance(f, RepoFile)
    }
    wrong = []
    for name, entry in read_manifest(folder)["files"].items():
        found = remote.get(name)
        is_there = found is not None and found.size == entry["bytes"]
        digest = found.lfs.sha256 if found is not None and found.lfs is not None else None
        if not is_there or digest not in (None, entry["sha256"]):
            wrong.append(name)
    if wrong:
        raise UploadError(
            f"after the upload `{repo}` does not hold what was sent: {listed(wrong)}",
            hint="run the same command again; what has arrived is not sent again",
        )


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Give errors of the hub and of the connection one sentence."""
    from huggingface_hub.errors import BadRequestError, HfHubHTTPError, RepositoryNotFoundError

    # What goes wrong on the way is an error of the HTTP library or of the system.
    transport: tuple[type[BaseException], ...] = HfHubHTTPError.__bases__
    # RuntimeError: while a file is sent
    failed: tuple[type[BaseException], ...] = (*transport, ValueError, RuntimeError)
    resume = "run the same command again; what has arrived is not sent again"
    try:
        yield
    except UploadError:
        raise
    except RepositoryNotFoundError as error:
        raise UploadError(
            f"`{repo}` does not exist, or the token may not see it: {_first_line(error)}",
            hint="a token of another user, or a fine-grained one without this repository?",
        ) from error
    except BadRequestError as error:
        raise UploadError(f"the hub refuses the upload to `{repo}`: {error}") from error
    except HfHubHTTPError as error:
        raise _refused(repo, error.response.status_code, error, resume) from error
    except failed as error:
        raise UploadError(
            f"the upload to `{repo}` failed: {_first_line(error)}", hint=resume
        ) from error


def _refused(repo: str, status: int, error: Exception, resume: str) -> UploadError:
    if status == 401:
        return UploadError(
            f"the hub does not know the token: {_first_line(error)}",
            hint="run `hf auth login`, or set `HF_TOKEN`",
        )
    if status == 403:
        return UploadError(
            f"the token may not write `{repo}`: {_first_line(error)}",
            hint="use a token with the permission to write to this owner's repositories",
        )
    return UploadError(f"the upload to `{repo}` failed: {_first_line(error)}", hint=resume)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines[0] if lines else type(error).__name__
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        return f"{line} {_first_line(error.__cause__)}"
    said = getattr(error, "server_message", None)  # what the hub itself says
    return f"{line}: {said}" if said and said not in line else line

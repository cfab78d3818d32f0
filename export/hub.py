"""Download a checkpoint from the Hugging Face hub."""

import re
from pathlib import Path

from specexport.errors import CheckpointError

_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "merges.txt", "vocab.txt"]


def download(hub_id: str, extra_patterns: tuple[str, ...] = ()) -> Path:
    """Local snapshot of `org/name[@revision]`; raises `CheckpointError` with the reason.

    `extra_patterns` name files to fetch besides config, safetensors and tokenizer.
    """
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?", hub_id):
        raise CheckpointError(
            f"{hub_id!r} is neither an existing path nor a hub id of the form org/name. "
            "Check the spelling of the path."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repo_id, _, revision = hub_id.partition("@")
    patterns = [*_FILES, *extra_patterns]
    try:
        return Path(snapshot_download(repo_id, revision=revision or None, allow_patterns=patterns))
    except GatedRepoError:
        reason = "the repository is gated: accept its terms on its page, then run `hf auth login`"
    except RepositoryNotFoundError:
        reason = "no such repository, or it is private: check the spelling or run `hf auth login`"
    except RevisionNotFoundError:
        reason = f"it has no revision {revision!r}"
    except (LocalEntryNotFoundError, OSError) as error:
        reason = (
            "the hub cannot be reached and no complete copy is in the local cache "
            f"({type(error).__name__}). Go online, or give a local directory"
        )
    raise CheckpointError(f"{hub_id} cannot be downloaded: {reason}.") from None

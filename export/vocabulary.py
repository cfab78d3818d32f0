"""A draft model must speak the target's token ids."""

import tempfile
from pathlib import Path

from specexport.errors import ConfigError
from specexport.export.checkpoint import Checkpoint


def require_same_vocabulary(target_tokenizer: Path, draft: Checkpoint, vocab_size: int) -> None:
    """Raise `ConfigError` naming the first id that stands for different tokens.

    Only ids that both tokenizers know count, so padding at the end is no difference, but the
    draft's embedding of `vocab_size` rows must cover all of the target's tokens.
    """
    target = _tokens(target_tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        draft.write_tokenizer(Path(folder))
        other = _tokens(Path(folder))
    for token_id in sorted(target.keys() & other.keys()):
        if target[token_id] != other[token_id]:
            raise ConfigError(
                f"The draft model has another tokenizer: id {token_id} is {target[token_id]!r} for "
                f"the target and {other[token_id]!r} for the draft. "
                "Choose a draft model of the target's family and generation, or --method ngram."
            )
    if max(target) >= vocab_size:
        raise ConfigError(
            f"The draft model has {vocab_size} token ids, but the target's tokenizer goes up to "
            f"{max(target)} ({target[max(target)]!r}). "
            "Choose a draft model of the target's family and generation, or --method ngram."
        )


def _tokens(directory: Path) -> dict[int, str]:
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab()
    return {token_id: token for token, token_id in vocabulary.items()}

"""A tokenizer must fit its model, and a draft model must speak the target's token ids."""

import json
import tempfile
from pathlib import Path

from specexport.errors import CheckpointError, ConfigError
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


def check_tokenizer(directory: Path, vocab_size: int) -> None:
    """Raise `CheckpointError` if the written tokenizer is damaged or of another model."""
    tokens = _tokens(directory)
    if tokens and max(tokens) >= vocab_size:
        raise CheckpointError(
            f"The tokenizer has token ids up to {max(tokens)} ({tokens[max(tokens)]!r}), the model "
            f"{vocab_size}. The tokenizer files are of another model."
        )
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is no valid JSON ({error}).") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path.name} must hold a JSON object; it holds {config!r:.60}.")
    template = config.get("chat_template")
    if not (template is None or isinstance(template, str) or _is_named(template)):
        raise CheckpointError(
            f"{path.name}: chat_template must be text, or a list of named templates."
        )


def _is_named(template: object) -> bool:
    keys = {"name", "template"}
    return isinstance(template, list) and all(
        isinstance(entry, dict) and keys <= set(entry) for entry in template
    )


def _tokens(directory: Path) -> dict[int, str]:
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    try:
        vocabulary = Tokenizer.from_file(str(path)).get_vocab()
    except Exception as error:  # tokenizers raises this very class
        raise CheckpointError(f"tokenizer.json is damaged: {error}. Download it again.") from None
    return {token_id: token for token, token_id in vocabulary.items()}

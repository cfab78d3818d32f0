"""The names of EAGLE tensors: each producer spells them a little differently."""

import re

from specexport.errors import CheckpointError
from specexport.export.heads.head_checkpoint import HeadCheckpoint
from specexport.export.heads.plan import RenamedTensors

FC = "fc.weight"
FC_BIAS = "fc.bias"
EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"

_SPELLINGS = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^aux_norm_low\."), "fc_norm.0."),
    (re.compile(r"^aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"^aux_norm_high\."), "fc_norm.2."),
)
# Recomputed from the config; parts of the target that speculators keeps for training.
_UNREAD = re.compile(r"(.*\.)?rotary_emb\.inv_freq|verifier_(norm|lm_head)\.weight")


def rename_eagle(head: HeadCheckpoint, apart: frozenset[str] = frozenset()) -> RenamedTensors:
    """The head's tensors under the graphs' names, without those `apart` (names in the file)."""
    renamed: dict[str, str] = {}
    for file in sorted(head.names()):
        if file in apart or _UNREAD.fullmatch(file):
            continue
        name = file
        for pattern, replacement in _SPELLINGS:
            name = pattern.sub(replacement, name)
        if name in renamed:
            raise CheckpointError(
                f"{head.source} holds one tensor under two names, {renamed[name]!r} and {file!r}. "
                "Remove one of them."
            )
        renamed[name] = file
    return RenamedTensors(head, renamed)

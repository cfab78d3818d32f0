"""The names of EAGLE tensors: each producer spells them a little differently."""

import re

from specexport.export.heads.head_checkpoint import HeadCheckpoint
from specexport.export.heads.plan import RenamedTensors, renamed_once

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
    read = [file for file in head.names() if file not in apart and not _UNREAD.fullmatch(file)]
    return RenamedTensors(head, renamed_once(head.source, read, _rename))


def _rename(name: str) -> str:
    for pattern, replacement in _SPELLINGS:
        name = pattern.sub(replacement, name)
    return name

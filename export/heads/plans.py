"""A method's name and its checkpoint → the plan of its head."""

from specexport.errors import ConfigError
from specexport.export.checkpoint import Checkpoint
from specexport.export.config import DecoderConfig
from specexport.export.heads.eagle import plan_eagle
from specexport.export.heads.eagle3 import plan_eagle3
from specexport.export.heads.head_checkpoint import open_head
from specexport.export.heads.joined import JoinedCheckpoint
from specexport.export.heads.medusa import plan_medusa
from specexport.export.heads.mtp import plan_mtp
from specexport.export.heads.plan import HeadPlan

HEAD_METHODS = {"medusa": plan_medusa, "eagle": plan_eagle, "eagle3": plan_eagle3}
"""Methods whose head is a checkpoint of its own."""


def plan_head(
    method: str, head: str | None, checkpoint: Checkpoint, target: DecoderConfig
) -> HeadPlan | None:
    """The plan of the head that `method` needs; None where it needs none.

    `head` is where it lies; an MTP layer lies in the target's own `checkpoint`, unless it is given.
    """
    if method == "mtp":
        if head is not None:
            checkpoint = JoinedCheckpoint(checkpoint, open_head(head), target.num_layers)
        return plan_mtp(checkpoint, target)
    if method not in HEAD_METHODS:
        if head is not None:
            raise ConfigError(
                f"--head has no meaning for method {method}. Give --method "
                f"{', '.join(HEAD_METHODS)} with it."
            )
        return None
    if head is None:
        raise ConfigError(f"Method {method} needs its head: give --head PATH.")
    opened = open_head(head)
    if method == "eagle":
        return plan_eagle(opened, target, lent=checkpoint)
    if method == "eagle3":
        return plan_eagle3(opened, target, lent=checkpoint)
    return plan_medusa(opened, target)

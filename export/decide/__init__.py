"""The graph that decides: logits and drafts → accepted tokens, without leaving the device."""

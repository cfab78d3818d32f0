"""Who wrote an EAGLE-3 head, what differs from the reference, and which kinds are refused.

| producer | recognised by |
|---|---|
| speculators | `transformer_layer_config` (the layers' config nested in it) |
| AngelSlim | architecture Eagle3LlamaForCausalLM |
| ModelOpt | architecture LlamaForCausalLMEagle3 with `layers.0.*` |
| SpecForge | architecture LlamaForCausalLMEagle3 with `midlayer.*` |
| SafeAILab | any other with `midlayer.*`: the reference |
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from specexport.errors import CheckpointError

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Eagle3Layout:
    """One producer's reading of a head's config."""

    producer: str
    layers: Config
    """config.json of the decoder layers."""
    draft_vocab_size: int | None
    norm_before_residual: bool
    """The residual stream starts after `hidden_norm` instead of before it."""
    norm_output: bool
    """EAGLE-3.1: the recycled state is taken after the final norm."""

    @property
    def name(self) -> str:
        """For people."""
        return f"EAGLE-3, {self.producer}"


def read_layout(config: Config, files: Collection[str], source: str) -> Eagle3Layout:
    """Recognise the producer; `files` are the tensors' names in the file.

    Raises `CheckpointError` for the variants that draft in another way.
    """
    _refuse_variants(config, files, source)
    nested = config.get("transformer_layer_config")
    is_speculators = isinstance(nested, dict)
    names = {"architectures": config.get("architectures")}
    layers: Config = {**nested, **names} if isinstance(nested, dict) else config
    return Eagle3Layout(
        producer=_producer(config, files),
        layers=layers,
        draft_vocab_size=_draft_vocab_size(config),
        # vLLM's default for speculators' configs, which came before the key.
        norm_before_residual=_flag(config, "norm_before_residual", default=is_speculators),
        norm_output=_flag(config, "norm_output", default=False),
    )


def check_norms(config: Config, names: Collection[str], source: str) -> None:
    """Raise `CheckpointError` where config.json says that the taps are normalised, but no norm is.

    `names` are the graphs' names of the tensors.
    """
    nested = config.get("eagle_config")
    both = {**config, **(nested if isinstance(nested, dict) else {})}
    for key, needed in (
        ("fc_norm", "fc_norm.0.weight"),
        ("use_aux_norm", "fc_norm.0.weight"),
        ("norm_before_fc", "input_norm.weight"),
    ):
        if _flag(both, key, default=False) and needed not in names:
            raise CheckpointError(
                f"config.json says {key}, but {source} holds no {needed!r}. Is the file complete?"
            )


def _producer(config: Config, files: Collection[str]) -> str:
    architectures = config.get("architectures") or []
    if "transformer_layer_config" in config:
        return "speculators"
    if "Eagle3LlamaForCausalLM" in architectures:
        return "AngelSlim"
    if "LlamaForCausalLMEagle3" in architectures:
        return "SpecForge" if any("midlayer." in name for name in files) else "ModelOpt"
    return "SafeAILab"


def _refuse_variants(config: Config, files: Collection[str], source: str) -> None:
    eagle_config = config.get("eagle_config")
    eagle_config = eagle_config if isinstance(eagle_config, dict) else {}
    kind = config.get("speculators_model_type", "eagle3")
    parallel = {"mask_hidden", "model.mask_hidden"} & set(files) or kind == "peagle"
    mask_ids = [config.get(key) for key in ("pard_token", "ptd_token_id")]
    reasons = {
        "it has multi-head latent attention (Eagle3DeepseekV2ForCausalLM)": any(
            "kv_a_proj_with_mqa" in name for name in files
        ),
        "it drafts all tokens in one pass (P-EAGLE, parallel drafting)": bool(
            parallel
            or config.get("parallel_drafting")
            or any(token_id is not None for token_id in mask_ids)
        ),
        "it has parallel draft heads (eagle_config.parallel_draft_step)": any(
            "parallel_draft_heads." in name for name in files
        )
        or (eagle_config.get("parallel_draft_step") or 1) != 1,
        "it reads no intermediate layers (eagle_config.use_aux_hidden_state is false)": (
            eagle_config.get("use_aux_hidden_state") is False
        ),
        f"it is of speculators' kind {kind!r}": kind not in ("eagle3", "peagle"),
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise CheckpointError(
            f"{source} is no EAGLE-3 head that can be exported: {found[0]}. Choose another head."
        )


def _flag(config: Config, key: str, *, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(
            f"config.json of the head: {key} is {value!r}; expected true or false."
        )
    return value


def _draft_vocab_size(config: Config) -> int | None:
    value = config.get("draft_vocab_size")
    if value is not None and (type(value) is not int or value < 1):
        raise CheckpointError(
            f"config.json of the head: draft_vocab_size is {value!r}; expected a positive number."
        )
    return value

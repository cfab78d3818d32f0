"""Who wrote an EAGLE-3 head, what differs from the reference, and which kinds are refused.

| producer | recognised by |
|---|---|
| speculators | `transformer_layer_config` (the layers' config nested in it) |
| AngelSlim | architecture Eagle3LlamaForCausalLM |
| ModelOpt | architecture LlamaForCausalLMEagle3 with `layers.0.*`, or Eagle3DeepseekV2ForCausalLM |
| SpecForge | architecture LlamaForCausalLMEagle3 with `midlayer.*` |
| SafeAILab | any other with `midlayer.*`: the reference |
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from specexport.errors import CheckpointError
from specexport.export.config_values import Size, Strict, check_values

Config = Mapping[str, Any]
_WHERE = "config.json of the head"
_LATENT_ARCHITECTURES = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")


class _Norms(Strict):
    """The taps are normalised: each (two spellings), or all together."""

    fc_norm: bool | None = None
    use_aux_norm: bool | None = None
    norm_before_fc: bool | None = None


class _EagleConfig(_Norms):
    """ModelOpt's nested settings."""

    parallel_draft_step: int | None = None
    use_aux_hidden_state: bool | None = None


class _Values(_Norms):
    """What the producers write beside the layers' own settings."""

    architectures: list[str] | None = None
    transformer_layer_config: dict[str, Any] | None = None
    eagle_config: _EagleConfig | None = None
    speculators_model_type: str | None = None
    draft_vocab_size: Size | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None
    parallel_drafting: bool | None = None
    pard_token: int | None = None
    ptd_token_id: int | None = None


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

    Raises `CheckpointError` for values of the wrong type and for the variants that draft in
    another way.
    """
    values = check_values(_Values, config, _WHERE)
    _refuse_variants(values, files, source)
    nested = values.transformer_layer_config
    # vLLM's default for speculators' configs, which came before the key.
    before_residual = nested is not None
    if values.norm_before_residual is not None:
        before_residual = values.norm_before_residual
    return Eagle3Layout(
        producer=_producer(values, files),
        layers=config if nested is None else {**nested, "architectures": values.architectures},
        draft_vocab_size=values.draft_vocab_size,
        norm_before_residual=before_residual,
        norm_output=bool(values.norm_output),
    )


def check_norms(config: Config, names: Collection[str], source: str) -> None:
    """Raise `CheckpointError` where config.json says that the taps are normalised, but no norm is.

    `names` are the graphs' names of the tensors.
    """
    values = check_values(_Values, config, _WHERE)
    nested = values.eagle_config or _EagleConfig()
    said = values.model_dump() | nested.model_dump(exclude_unset=True)
    for key, needed in (
        ("fc_norm", "fc_norm.0.weight"),
        ("use_aux_norm", "fc_norm.0.weight"),
        ("norm_before_fc", "input_norm.weight"),
    ):
        if said[key] and needed not in names:
            raise CheckpointError(
                f"config.json says {key}, but {source} holds no {needed!r}. Is the file complete?"
            )


def _producer(values: _Values, files: Collection[str]) -> str:
    architectures = values.architectures or []
    if values.transformer_layer_config is not None:
        return "speculators"
    if "Eagle3LlamaForCausalLM" in architectures:
        return "AngelSlim"
    if any(name in architectures for name in _LATENT_ARCHITECTURES):
        return "ModelOpt"
    if "LlamaForCausalLMEagle3" in architectures:
        return "SpecForge" if any("midlayer." in name for name in files) else "ModelOpt"
    return "SafeAILab"


def _refuse_variants(values: _Values, files: Collection[str], source: str) -> None:
    nested = values.eagle_config or _EagleConfig()
    kind = values.speculators_model_type or "eagle3"
    parallel = {"mask_hidden", "model.mask_hidden"} & set(files) or kind == "peagle"
    mask_ids = (values.pard_token, values.ptd_token_id)
    reasons = {
        "it drafts all tokens in one pass (P-EAGLE, parallel drafting)": bool(
            parallel
            or values.parallel_drafting
            or any(token_id is not None for token_id in mask_ids)
        ),
        "it has parallel draft heads (eagle_config.parallel_draft_step)": any(
            "parallel_draft_heads." in name for name in files
        )
        or (nested.parallel_draft_step or 1) != 1,
        "it reads no intermediate layers (eagle_config.use_aux_hidden_state is false)": (
            nested.use_aux_hidden_state is False
        ),
        f"it is of speculators' kind {kind!r}": kind not in ("eagle3", "peagle"),
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise CheckpointError(
            f"{source} is no EAGLE-3 head that can be exported: {found[0]}. Choose another head."
        )

"""A target that goes through its vocabulary in a fixed order, and heads that know the order.

Token ORDER[k] is embedded as R^k u, where R turns each of 15 planes of the hidden state by an angle
of its own, and ORDER[k + 1] follows it. The target's layers add nothing to the embedding, so its
next token depends on the last one alone. A head can predict it in two ways: from the embedding of
the token that it is given, or by turning the hidden state of the token before it.

What could hide a mistake is made to show: the final norm changes the sign of some planes (a state
before it is no state after it), and each layer adds a constant of its own beside the planes (the
states of two layers differ). `noise` lets the random weights of the layers in again, so that heads
are right only now and then, and the target depends on all of its text.
"""

from functools import cache
from typing import Any, Literal

import torch

from tests.heads_tiny import HIDDEN, Tensors
from tests.tiny import VOCAB_SIZE
from tests.tiny_eagle3 import Case as Eagle3Case
from tests.tiny_eagle3 import draft_ids
from tests.tiny_mla import LATENT_CONFIG

Source = Literal["embedding", "hidden"]
"""What a head predicts from: the token that it is given, or the hidden state before it."""

NUM_PLANES, CONSTANT = 15, 30
"""Dimensions 0 to 29 are planes; number 30 holds what the layers add."""
SHARPNESS = 8.0
"""The right token's logit; the others are near normal with a deviation of 1.5."""
_FOCUS = 8.0  # an attention this sharp looks at its own row alone

ORDER = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(5)).tolist()
"""Tokens as they follow one another; the reduced vocabulary of EAGLE-3 heads is its beginning."""


def follow(token_id: int, count: int) -> list[int]:
    """The `count` tokens after `token_id`."""
    start = ORDER.index(token_id) + 1
    return [ORDER[(start + i) % VOCAB_SIZE] for i in range(count)]


@cache
def turn(steps: int = 1) -> torch.Tensor:
    """R^steps: [H, H], fp64; the identity beside the planes."""
    found = torch.eye(HIDDEN, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    numbers = [1, *(torch.randperm(VOCAB_SIZE // 2 - 2, generator=generator) + 2).tolist()]
    for plane, number in enumerate(numbers[:NUM_PLANES]):
        angle = torch.tensor(2 * torch.pi * number * steps / VOCAB_SIZE, dtype=torch.float64)
        i = 2 * plane
        found[i, i] = found[i + 1, i + 1] = angle.cos()
        found[i + 1, i], found[i, i + 1] = angle.sin(), -angle.sin()
    return found


@cache
def embedding() -> torch.Tensor:
    """[V, H], rows with a mean square of 1."""
    row = torch.zeros(HIDDEN, dtype=torch.float64)
    row[0 : 2 * NUM_PLANES : 2] = (HIDDEN / NUM_PLANES) ** 0.5
    found = torch.zeros(VOCAB_SIZE, HIDDEN, dtype=torch.float64)
    for token_id in ORDER:
        found[token_id] = row
        row = turn() @ row
    return found


@cache
def final_norm() -> torch.Tensor:
    """[H]: the same for both dimensions of a plane, so that turning commutes with it."""
    generator = torch.Generator().manual_seed(4)
    planes = torch.rand(NUM_PLANES, generator=generator, dtype=torch.float64) + 0.5
    planes[::2] *= -1
    return torch.cat([planes.repeat_interleave(2), torch.ones(2, dtype=torch.float64)])


def constants() -> torch.Tensor:
    """What each layer adds in the dimension `CONSTANT`."""
    generator = torch.Generator().manual_seed(6)
    return torch.rand(8, generator=generator, dtype=torch.float64) * 0.5


def added(num_layers: int) -> float:
    """What the first layers add together."""
    return float(constants()[:num_layers].sum())


def output_matrix() -> torch.Tensor:
    """[V, H]: logits of a normed state are `SHARPNESS` times its likeness to each predecessor."""
    before = [ORDER[ORDER.index(token_id) - 1] for token_id in range(VOCAB_SIZE)]
    found = embedding()[before] / final_norm() * SHARPNESS / HIDDEN
    found[:, 2 * NUM_PLANES :] = 0
    return found


def teach_target(model: Any, noise: float = 0.0) -> None:
    """Make a model of transformers go through `ORDER`."""
    total = 0.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj.weight" in name or "down_proj" in name:
                parameter.mul_(noise)
            if name.endswith("o_proj.bias"):
                parameter.zero_()
                parameter[CONSTANT] = constants()[int(name.split(".")[2])]
                total += float(parameter[CONSTANT])
        model.get_input_embeddings().weight.copy_(embedding())
        model.get_output_embeddings().weight.copy_(output_matrix() / scale_of(total))
        model.model.norm.weight.copy_(final_norm())


def scale_of(constant: float) -> float:
    """What a norm makes of the planes where `constant` stands beside them."""
    return float((1 + constant**2 / HIDDEN) ** -0.5)


def teach_eagle(w: Tensors, source: Source, num_layers: int, noise: float = 0.0) -> Tensors:
    """EAGLE-1: `fc(cat(e, h))` is the target's state after its final norm."""
    scale = scale_of(added(num_layers))
    exact = {
        "embedding": (torch.diag(final_norm()) * scale, torch.zeros(HIDDEN, HIDDEN)),
        "hidden": (torch.zeros(HIDDEN, HIDDEN), turn()),
    }[source]
    taught = {"fc.weight": torch.cat(exact, 1) + noise * w["fc.weight"]}
    return _finish(w, taught, noise)


def teach_eagle3(
    case: Eagle3Case, w: Tensors, source: Source, num_layers: int, noise: float = 0.0
) -> Tensors:
    """EAGLE-3: the taps, fused, are the embedding; the layer turns it, or reads the token's own."""
    size = case.size
    planes = min(2 * NUM_PLANES, size)
    norm = final_norm()[:size]
    cut = torch.zeros(size, HIDDEN, dtype=torch.float64)
    cut[:planes, :planes] = torch.eye(planes) * (size / planes * 2 * NUM_PLANES / HIDDEN) ** 0.5
    one = torch.eye(size, dtype=torch.float64)
    encoding = torch.diag(norm) if case.norm_output else one  # of a state that is recycled
    rms = float((torch.diag(encoding)[:planes] ** 2).mean() ** 0.5)
    residual = one / rms if case.norm_before_residual else encoding
    if source == "hidden":
        value = torch.cat([0 * one, rms * (turn()[:size, :size] - residual)], 1)
    else:
        value = torch.cat([one, -rms * residual], 1)
    taught = {
        "fc.weight": encoding @ cut @ _fusing(case, num_layers) * (source == "hidden"),
        "layers.0.input_layernorm.weight": torch.ones(size),
        "layers.0.hidden_norm.weight": 1 / torch.diag(encoding),
        "norm.weight": norm,
    }
    taught |= _latent_attention(w, value, rms) if case.is_latent else _attention(case, value)
    for name in ("fc", *(f"layers.0.self_attn.{kind}_proj" for kind in ("v", "kv_b", "o"))):
        if f"{name}.weight" in taught:
            taught[f"{name}.weight"] = taught[f"{name}.weight"] + noise * w[f"{name}.weight"]
    if case.own_embedding:
        taught["embed_tokens.weight"] = embedding() @ cut.T
    if case.own_lm_head:
        ids = draft_ids() if case.reduced else torch.arange(VOCAB_SIZE)
        taught["lm_head.weight"] = output_matrix()[ids][:, :size]
    else:
        taught["norm.weight"] = norm * scale_of(added(num_layers))
    taught |= {f"fc_norm.{i}.weight": torch.ones(HIDDEN) for i in range(3 * case.fc_norm)}
    return _finish(w, taught, noise)


def _attention(case: Eagle3Case, value: torch.Tensor) -> Tensors:
    """Grouped-query attention that gives `value` [H, 2 * H] of its own row."""
    size = case.size
    focus = _FOCUS * torch.eye(case.head_dim, 2 * size, dtype=torch.float64)
    attended = torch.zeros(2 * case.head_dim, 2 * size, dtype=torch.float64)
    attended[:size] = value
    output = torch.zeros(size, 4 * case.head_dim, dtype=torch.float64)
    for i in range(size):  # two query heads read each key-value head
        output[i, i if i < case.head_dim else i + case.head_dim] = 1
    taught = {"q_proj": focus.repeat(4, 1), "k_proj": focus.repeat(2, 1)}
    taught |= {"v_proj": attended, "o_proj": output}
    return {f"layers.0.self_attn.{name}.weight": tensor for name, tensor in taught.items()}


def _latent_attention(w: Tensors, value: torch.Tensor, rms: float) -> Tensors:
    """The same where `value` reads the hidden state alone, 1 / `rms` large: it is the latent.

    The rotated parts stay random; they weigh little beside the others.
    """

    def one(rows: int, columns: int) -> torch.Tensor:
        return torch.eye(rows, columns, dtype=torch.float64)

    nope = LATENT_CONFIG["qk_nope_head_dim"]
    size, rank = LATENT_CONFIG["kv_lora_rank"], LATENT_CONFIG["q_lora_rank"]
    name = "layers.0.self_attn"
    hidden = torch.cat([0 * one(HIDDEN, HIDDEN), one(HIDDEN, HIDDEN)], 1)
    query = w[f"{name}.q_b_proj.weight"].double().view(4, -1, rank).clone()
    query[:, :nope] = _FOCUS * one(nope, rank)
    entry = w[f"{name}.kv_a_proj_with_mqa.weight"].double()
    up = torch.empty(4, nope + HIDDEN // 4, size, dtype=torch.float64)
    up[:, :nope] = _FOCUS * one(nope, size)
    up[:, nope:] = (value[:, HIDDEN:] @ one(HIDDEN, size)).view(4, -1, size)
    taught = {
        "q_a_proj": one(rank, HIDDEN) @ hidden,
        "q_a_layernorm": torch.ones(rank),
        "q_b_proj": query.flatten(0, 1),
        "kv_a_proj_with_mqa": torch.cat([one(size, HIDDEN) @ hidden, entry[size:]]),
        "kv_a_layernorm": torch.full((size,), (HIDDEN / size) ** 0.5 / rms),
        "kv_b_proj": up.flatten(0, 1),
        "o_proj": one(HIDDEN, HIDDEN),
    }
    return {f"{name}.{kind}.weight": tensor for kind, tensor in taught.items()}


def _fusing(case: Eagle3Case, num_layers: int) -> torch.Tensor:
    """[H, 3 * H]: the mean of three taps' planes, spoilt unless each is of the right layer."""
    taps = (1, num_layers // 2 - 1, num_layers - 4)
    scales = [scale_of(added(tap + 1)) if case.fc_norm else 1.0 for tap in taps]
    seen = [added(tap + 1) * scale for tap, scale in zip(taps, scales, strict=True)]
    weights = [5.0, 5.0, -5.0 * (seen[0] + seen[1]) / seen[2]]  # together they cancel the constants
    blocks = []
    for scale, weight in zip(scales, weights, strict=True):
        block = torch.eye(HIDDEN, dtype=torch.float64) / (3 * scale)
        block[:, CONSTANT] = weight * embedding()[ORDER[100]]
        blocks.append(block)
    return torch.cat(blocks, 1)


def teach_medusa(head: Tensors, depth: int, noise: float = 0.0, scale: float = 1.0) -> Tensors:
    """Head `depth`, from 0: its output matrix is the target's for the token `depth` + 1 earlier."""
    earlier = [ORDER[ORDER.index(token_id) - depth - 1] for token_id in range(VOCAB_SIZE)]
    exact = output_matrix()[earlier] / scale
    quiet = {name: tensor * noise for name, tensor in head.items() if name != "out"}
    return {**quiet, "out": (exact + noise * head["out"]).float()}


def teach_mtp(
    own: Tensors, source: Source, *, hidden_first: bool, reads_normed: bool, noise: float = 0.0
) -> Tensors:
    """MTP: the projection gives the embedding, or turns the hidden state."""
    norm, zero = final_norm(), torch.zeros(HIDDEN, HIDDEN, dtype=torch.float64)
    rms = float((norm[: 2 * NUM_PLANES] ** 2).mean() ** 0.5)
    unnormed = torch.diag(rms / norm) if reads_normed else torch.eye(HIDDEN, dtype=torch.float64)
    e, h = (torch.eye(HIDDEN), zero) if source == "embedding" else (zero, turn() @ unnormed)
    exact = torch.cat((h, e) if hidden_first else (e, h), 1)
    return {
        "embedding_norm": torch.ones(HIDDEN),
        "hidden_norm": torch.ones(HIDDEN),
        "projection": (exact + noise * own["projection"]).float(),
        "final_norm": norm.float(),
        "embedding": embedding().float(),
        "lm_head": output_matrix().float(),
    }


def _finish(w: Tensors, taught: Tensors, noise: float) -> Tensors:
    """All tensors, fp32; what layers add otherwise times `noise`, so that at 0 it is nothing."""
    loud = ("o_proj.weight", "down_proj.weight")
    quiet = {name: t * noise if name.endswith(loud) else t for name, t in w.items()}
    return {name: t.float() for name, t in (quiet | taught).items()}

"""What `validate` measured: `validation.json` and a table."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict
from rich.markup import escape
from rich.table import Table

# ONNX Runtime rounds the activations that integer weights multiply to int8 in blocks of 32. On
# SmolLM2 that costs a mean KL of 0.003 to 0.004, and the two largest logits move against each other
# by 0.7 at the most.
KERNEL_KL = 0.02
KERNEL_TOLERANCE = 0.5


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class LogitsReport(_Frozen):
    """One graph's logits against PyTorch's, teacher-forced through the cache."""

    num_positions: int
    max_abs_diff: float
    mean_abs_diff: float
    tolerance: float
    top1_agreement: float
    """Share of positions with the same largest logit."""
    max_kl: float
    """Largest KL divergence of a position, nats."""
    passed: bool


class HeadReport(LogitsReport):
    """A head's logits, over texts and over draft steps that recycle its own states."""

    layout: str
    num_draft_steps: int
    """0 for heads that draft in one pass."""
    same_token_map: bool
    """The target's ids of a reduced vocabulary are the checkpoint's."""


class DivergenceReport(_Frozen):
    """The bundle as it runs against PyTorch, over the shipped prompts."""

    num_positions: int
    reference_perplexity: float
    """PyTorch's."""
    perplexity: float
    """The bundle's."""
    mean_kl: float
    """KL divergence of the bundle from PyTorch, nats, mean over all positions."""
    max_kl: float
    top1_agreement: float


class GreedyDifference(_Frozen):
    """Where two greedy outputs part."""

    prompt: int
    compared: str
    position: int
    tokens: tuple[int, int]
    top2_gap: float
    """Between PyTorch's two largest logits there."""


class GreedyReport(_Frozen):
    """Greedy tokens of PyTorch, of the bundle without and with speculation."""

    num_prompts: int
    num_tokens: int
    identical: bool
    differences: tuple[GreedyDifference, ...]
    acceptance_length: float
    acceptance_per_position: tuple[float, ...]
    passed: bool
    """Identical, or parted only where PyTorch's own top two are a numerical tie."""


class DistributionReport(_Frozen):
    """χ² of sampled outputs, with speculation, against PyTorch's exact probabilities."""

    num_samples: int
    num_cells: int
    num_drafts: int
    chi2: float
    p_value: float
    false_alarm_rate: float
    passed: bool


class DialectReport(_Frozen):
    """What TensorRT would refuse in the bundle's graphs, or drop silently."""

    num_graphs: int
    findings: tuple[str, ...]
    passed: bool
    """Findings matter to bundles with engines alone."""


class OutputReport(_Frozen):
    """One output of one graph on an engine, against the same ONNX file on a CPU."""

    graph: str
    output: str
    max_relative_diff: float
    """Largest difference, of the output's largest number."""
    tolerance: float
    passed: bool


class EngineReport(_Frozen):
    """What was proved of an engine, which has two halves: that it is built, and its numbers."""

    engine: str
    library_version: str | None
    built_for: tuple[str, ...]
    """GPUs that plans of these very graphs were built for; none for engines without plans."""
    precision: str
    compared_on: str | None
    """The GPU whose numbers were compared; None: there was none that runs these plans."""
    outputs: tuple[OutputReport, ...]
    passed: bool

    def halves(self) -> tuple[str, str]:
        """What was proved, and what was not."""
        plans = f"{self.engine} {self.library_version} built {self.precision} plans of these very"
        proved = [f"{plans} graphs for {', '.join(self.built_for)}"] if self.built_for else []
        if self.compared_on is None:
            return proved[0], (
                "what these plans compute was NOT compared: no GPU here runs them. The same ONNX "
                "files were compared with PyTorch on this CPU"
            )
        proved.append(f"every output agrees with ONNX Runtime's CPU provider on {self.compared_on}")
        return "; ".join(proved), "other GPUs, and what speed comes of it"


class ValidationReport(_Frozen):
    """All of `validation.json`."""

    passed: bool
    num_prompts: int
    max_abs_logit_diff: float
    top1_agreement: float
    greedy_identical: bool
    distribution_test: DistributionReport
    target: LogitsReport
    draft: LogitsReport | None
    head: HeadReport | None
    head_not_compared: str | None
    """Why there is no report of the bundle's head."""
    kernels: DivergenceReport | None = None
    """Integer weights: what rounding the activations costs, against the same weights in fp32."""
    loss: DivergenceReport | None = None
    """Weights in fewer bits: what all rounding costs, against the checkpoint's own numbers."""
    greedy: GreedyReport
    tensorrt: DialectReport
    engine: EngineReport | None = None
    """With --engine."""
    method: str
    num_speculative_tokens: int
    acceptance: str
    """The bundle's rule; whatever it is, the lossless one was validated."""
    checkpoint: str
    rounded_to: str | None
    """PyTorch's weights were rounded so too, because the bundle stores fewer bits."""
    machine: str
    versions: dict[str, str]


def report_table(report: ValidationReport) -> Table:
    """The report for a person."""
    rounded = f", weights rounded to {report.rounded_to}" if report.rounded_to else ""
    title = f"against PyTorch ({escape(report.checkpoint)}{rounded})"
    table = Table(title=title, title_justify="left")
    for heading in ("", "test", "measured", "wanted"):
        table.add_column(heading)
    for role, logits in _logits_reports(report).items():
        if logits is not None:
            _add(
                table,
                logits.passed,
                f"{role} logits, {logits.num_positions} positions",
                f"max |Δ| {logits.max_abs_diff:.2e}, mean {logits.mean_abs_diff:.2e}, "
                f"KL ≤ {logits.max_kl:.1e}, top-1 {logits.top1_agreement:.2%}",
                f"max |Δ| ≤ {logits.tolerance:g}",
            )
    greedy = report.greedy
    found = "identical" if greedy.identical else f"{len(greedy.differences)} outputs part"
    _add(
        table,
        greedy.passed,
        f"greedy tokens, {greedy.num_prompts} prompts x 3 ways",
        f"{greedy.num_tokens} tokens, {found}, acceptance length {greedy.acceptance_length:.2f}"
        f"{_per_position(greedy)}",
        "PyTorch = plain = speculative"
        if report.kernels is None
        else f"PyTorch's top-2 gap ≤ {2 * KERNEL_TOLERANCE:g} wherever they part",
    )
    test = report.distribution_test
    _add(
        table,
        test.passed,
        f"sampling, {test.num_samples} samples, {test.num_drafts} drafts",
        f"χ² {test.chi2:.1f} over {test.num_cells} cells, p = {test.p_value:.3f}",
        f"p ≥ {test.false_alarm_rate:g} (false alarms)",
    )
    _add_divergences(table, report)
    _add_dialect(table, report.tensorrt)
    if report.engine is not None:
        _add_engine(table, report.engine)
    for difference in greedy.differences:
        table.add_row(
            "",
            f"prompt {difference.prompt}: {difference.compared}",
            f"part at token {difference.position}: {difference.tokens[0]} / {difference.tokens[1]}",
            f"PyTorch's top-2 gap {difference.top2_gap:.2e}",
        )
    if report.head_not_compared:
        table.add_row("[yellow]?[/yellow]", "head logits", "NOT compared", report.head_not_compared)
    table.caption = "; ".join(_verdict(report))
    return table


def _logits_reports(report: ValidationReport) -> dict[str, LogitsReport | None]:
    reports: dict[str, LogitsReport | None] = {"target": report.target, "draft": report.draft}
    if report.head is not None:
        reports[report.head.layout] = report.head
    return reports


def _per_position(greedy: GreedyReport) -> str:
    rates = " ".join(f"{rate:.2f}" for rate in greedy.acceptance_per_position)
    return f", per position {rates}" if rates else ""


def _verdict(report: ValidationReport) -> Iterator[str]:
    yield "passed" if report.passed else "FAILED"
    if report.engine is not None and report.engine.compared_on is None:
        yield f"the numbers of {report.engine.engine} were not compared: no GPU here runs its plans"
    if report.head_not_compared:
        yield "the head's graph was not compared with PyTorch"
    if report.head is not None and not report.head.same_token_map:
        yield "the token map is not the checkpoint's"
    if report.acceptance != "lossless":
        yield f"validated lossless: the bundle's own rule, {report.acceptance}, is LOSSY"


def _add_divergences(table: Table, report: ValidationReport) -> None:
    """What weights in fewer bits cost; there is nothing to say of others."""
    if (kernels := report.kernels) is not None:
        _add(
            table,
            kernels.mean_kl <= KERNEL_KL,
            f"integer kernels, {kernels.num_positions} positions",
            _divergence(kernels),
            f"mean KL ≤ {KERNEL_KL:g}",
        )
    if (loss := report.loss) is not None:
        name = f"LOSSY: against unrounded weights, {loss.num_positions} positions"
        table.add_row("", name, _divergence(loss), "for you to judge")


def _add_dialect(table: Table, found: DialectReport) -> None:
    graphs = f"{found.num_graphs} graph{'s' * (found.num_graphs > 1)}"
    count = f"{len(found.findings)} findings" if found.findings else "none found"
    mark = "" if found.passed else "[red]✗[/red]"
    table.add_row(
        mark, f"what TensorRT would refuse, {graphs}", count, "none in a bundle's engines"
    )
    for finding in found.findings:
        table.add_row("", "", escape(finding), "")


def _add_engine(table: Table, found: EngineReport) -> None:
    for output in found.outputs:
        _add(
            table,
            output.passed,
            f"{found.engine}, {output.graph}: {output.output}",
            f"max |Δ| {output.max_relative_diff:.2e} of the largest",
            f"≤ {output.tolerance:g} ({found.precision})",
        )
    proved, not_proved = found.halves()
    if found.passed:
        table.add_row("", f"{found.engine}: proved", proved, "")
    table.add_row("[yellow]?[/yellow]", f"{found.engine}: NOT proved", not_proved, "")


def _divergence(found: DivergenceReport) -> str:
    return (
        f"perplexity {found.reference_perplexity:.2f} → {found.perplexity:.2f}, "
        f"mean KL {found.mean_kl:.1e}, top-1 {found.top1_agreement:.2%}"
    )


def _add(table: Table, passed: bool, *cells: Any) -> None:  # noqa: ANN401
    table.add_row("[green]✓[/green]" if passed else "[red]✗[/red]", *cells)

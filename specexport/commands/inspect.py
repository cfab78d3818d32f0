"""`specexport inspect`."""

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specexport.commands.common import BUNDLE
from specexport.errors import BundleError
from specexport.export.manifest import GraphSpec, Manifest, read_manifest, verify_files

_EXAMPLES = """\b
Examples:
  specexport inspect smollm2
  specexport inspect smollm2 --json | jq .manifest.method
"""


@click.command(epilog=_EXAMPLES)
@click.argument("bundle", type=BUNDLE)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(bundle: Path, as_json: bool) -> None:
    """Show the graphs, inputs, sizes and drafting method of BUNDLE, and check its files."""
    manifest = read_manifest(bundle)
    verify_files(bundle, manifest)
    path = bundle / "validation.json"
    validation = _read_validation(path)
    if as_json:
        value = {"manifest": manifest.model_dump(mode="json"), "validation": validation}
        click.echo(json.dumps(value))
        return
    console = Console(highlight=False)
    console.print(_overview(manifest, validation))
    for role, spec in (("target", manifest.target), ("draft", manifest.draft)):
        if spec is not None:
            console.print(_graph(role, spec))
    console.print(_files(manifest))


def _read_validation(path: Path) -> dict[str, Any] | None:
    """What `validate` wrote; None where it never ran."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text())
        passed = value["passed"]
    except (ValueError, TypeError, KeyError):
        passed = None
    if not isinstance(passed, bool):
        raise BundleError(f"{path} is damaged. Run specexport validate again.")
    return dict(value)


def _overview(manifest: Manifest, validation: dict[str, Any] | None) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    method = ", ".join(f"{k} {v}" for k, v in manifest.method.model_dump(exclude={"kind"}).items())
    table.add_row("method", f"{manifest.method.kind} ({method})")
    table.add_row("made from", escape(manifest.provenance.checkpoint))
    if manifest.provenance.draft_checkpoint:
        table.add_row("draft from", escape(manifest.provenance.draft_checkpoint))
    for note in manifest.provenance.notes:
        table.add_row("note", escape(note))
    table.add_row("end of sequence", ", ".join(map(str, manifest.eos_token_ids)) or "none")
    table.add_row(
        "versions", ", ".join(f"{k} {v}" for k, v in manifest.provenance.versions.items())
    )
    state = "never (run specexport validate)"
    if validation is not None:
        state = "passed" if validation["passed"] else "FAILED (see validation.json)"
    table.add_row("validated", state)
    return table


def _graph(role: str, spec: GraphSpec) -> Table:
    table = Table(title=f"{role}: {spec.architecture}", title_justify="left")
    table.add_column("tensor")
    table.add_column("type")
    table.add_column("shape")
    for direction, tensors in (("→", spec.inputs), ("←", spec.outputs)):
        for tensor in tensors:
            layer = tensor.name.split(".")[1:2]
            if layer in ([], ["0"]):
                times = f" ({spec.num_layers} layers)" if layer else ""
                shape = ", ".join(map(str, tensor.shape))
                table.add_row(
                    f"{direction} {tensor.name}{times}",
                    tensor.dtype,
                    escape(f"[{shape}]"),
                )
    window = f", sliding window {spec.sliding_window}" if spec.sliding_window else ""
    table.caption = (
        f"{spec.num_parameters / 1e6:.1f}M parameters as {spec.stored_as}, vocabulary "
        f"{spec.vocab_size}, up to {spec.max_length} tokens{window}"
    )
    table.caption_justify = "left"
    return table


def _files(manifest: Manifest) -> Table:
    table = Table(title="files (all match the manifest)", title_justify="left")
    table.add_column("name")
    table.add_column("bytes", justify="right")
    table.add_column("SHA-256")
    for name, entry in manifest.files.items():
        table.add_row(name, f"{entry.size_bytes:,}", f"{entry.sha256[:16]}…")
    return table

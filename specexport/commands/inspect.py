"""`specexport inspect`."""

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specexport.commands.common import BUNDLE
from specexport.commands.inspect_engine import engine_report
from specexport.commands.inspect_head import drafting_rows, tensor_table
from specexport.errors import BundleError
from specexport.export.manifest import (
    FunctionSpec,
    GraphSpec,
    Manifest,
    read_manifest,
    verify_files,
)

_EXAMPLES = """\b
Examples:
  specexport inspect smollm2
  specexport inspect smollm2 --json | jq .manifest.method
"""


@click.command(epilog=_EXAMPLES)
@click.argument("bundle", type=BUNDLE)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(bundle: Path, as_json: bool) -> None:
    """Show the graphs, sizes, drafting method, head and engines of BUNDLE; check its files."""
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
    for role, spec in _graphs(manifest).items():
        console.print(_graph(role, spec))
    if manifest.head:
        console.print(tensor_table(manifest.head))
    for engine in manifest.engines:
        console.print(engine_report(bundle, manifest, engine))
    console.print(_files(manifest))


def _graphs(manifest: Manifest) -> dict[str, GraphSpec | FunctionSpec]:
    """All graphs of the bundle, by what they are for."""
    head = manifest.head
    named: dict[str, GraphSpec | FunctionSpec | None] = {
        "target": manifest.target,
        "draft": manifest.draft,
    }
    if head:
        named["head, one draft step"] = head.step
        named["head, fusing the target's hidden states"] = head.fuse
        named["Medusa heads"] = head.medusa
    return {role: spec for role, spec in named.items() if spec is not None}


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
    for name, words in drafting_rows(manifest).items():
        table.add_row(name, words)
    table.add_row("made from", escape(manifest.provenance.checkpoint))
    if manifest.provenance.draft_checkpoint:
        table.add_row("draft from", escape(manifest.provenance.draft_checkpoint))
    if manifest.provenance.head_checkpoint:
        table.add_row("head from", escape(manifest.provenance.head_checkpoint))
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


def _graph(role: str, spec: GraphSpec | FunctionSpec) -> Table:
    num_layers = spec.num_layers if isinstance(spec, GraphSpec) else 0
    title = f"{role}: {spec.architecture}" if isinstance(spec, GraphSpec) else role
    table = Table(title=title, title_justify="left")
    table.add_column("tensor")
    table.add_column("type")
    table.add_column("shape")
    for direction, tensors in (("→", spec.inputs), ("←", spec.outputs)):
        for tensor in tensors:
            layer = tensor.name.split(".")[1:2]
            if layer in ([], ["0"]):
                times = f" ({num_layers} layer{'s' * (num_layers > 1)})" if layer else ""
                shape = ", ".join(map(str, tensor.shape))
                table.add_row(
                    f"{direction} {tensor.name}{times}",
                    tensor.dtype,
                    escape(f"[{shape}]"),
                )
    table.caption, table.caption_justify = _sizes(spec), "left"
    return table


def _sizes(spec: GraphSpec | FunctionSpec) -> str:
    own = f"{spec.num_parameters / 1e6:.1f}M parameters as {spec.stored_as}"
    if not isinstance(spec, GraphSpec):
        return own
    window = f", sliding window {spec.sliding_window}" if spec.sliding_window else ""
    return f"{own}, vocabulary {spec.vocab_size}, up to {spec.max_length} tokens{window}"


def _files(manifest: Manifest) -> Table:
    table = Table(title="files (all match the manifest)", title_justify="left")
    table.add_column("name")
    table.add_column("bytes", justify="right")
    table.add_column("SHA-256")
    for name, entry in manifest.files.items():
        table.add_row(name, f"{entry.size_bytes:,}", f"{entry.sha256[:16]}…")
    return table

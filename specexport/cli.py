"""The command line. Commands are imported when they run, so that --help answers at once."""

import os
import signal
import sys
from importlib import import_module
from typing import Any, NoReturn

import click

from specexport import __version__
from specexport.errors import SpecExportError

# Command → one-line help; the command itself is `command` in specexport/commands/<name>.py.
_COMMANDS = {
    "build": "Export a checkpoint and its drafter to a bundle.",
    "generate": "Continue a prompt, streaming, with statistics.",
    "chat": "Talk with a bundle in its own chat template.",
    "validate": "Prove a bundle against PyTorch.",
    "data": "Make the data that drafting heads are trained on.",
    "train": "Train a drafting head of a target on its own answers.",
    "tune": "Measure what steps cost on this machine, for adaptive draft lengths.",
    "bench": "Measure speed under load: speculation off, fixed and adaptive.",
    "inspect": "Show what a bundle holds.",
    "doctor": "Show what is installed and which engines can be used.",
}


class _LazyGroup(click.Group):
    """Lists commands without importing them; turns our errors into one line and exit status 1."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        try:
            module = import_module(f"specexport.commands.{cmd_name}")
        except ModuleNotFoundError as error:
            raise click.ClickException(_missing_package(cmd_name, error)) from None
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - click's signature
        try:
            return super().invoke(ctx)
        except SpecExportError as error:
            raise click.ClickException(str(error)) from None
        except ModuleNotFoundError as error:
            raise click.ClickException(_missing_package(ctx.invoked_subcommand, error)) from None
        except BrokenPipeError:
            raise
        except OSError as error:  # a file that cannot be read or written, a full disk
            where = f"{error.filename}: " if error.filename else ""
            raise click.ClickException(f"{where}{error.strerror or error}.") from None


def _missing_package(command: str | None, error: ModuleNotFoundError) -> str:
    return (
        f"`specexport {command}` needs the package {error.name!r}, which is not installed. "
        "Install it with: pip install 'specexport[export]'"
    )


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with: specexport build MODEL -o BUNDLE, then specexport chat BUNDLE.",
)
@click.version_option(__version__, prog_name="specexport")
def cli() -> None:
    """Export, optimise and run speculative decoding: faster tokens, the target's own output."""


def _terminate(signal_number: int, frame: object) -> NoReturn:
    sys.exit(128 + signal_number)  # unwinds, so that nothing half-written stays


def main() -> None:
    """Entry point; Ctrl-C ends with status 130 and no traceback."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        status = cli.main(standalone_mode=False) or 0
        sys.stdout.flush()
        sys.exit(status)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.Abort:
        click.echo("\nInterrupted.", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except OSError as error:  # the reader of a pipe went away, or the disk under it is full
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing more to flush
        if isinstance(error, BrokenPipeError):
            sys.exit(141)
        click.echo(f"Error: the output cannot be written: {error.strerror}.", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()

"""A file of lines that grows by whole lines and survives a kill."""

import os
from pathlib import Path
from typing import Self

from specexport.training.disk import told_when_full


class LineFile:
    """Opened for appending; a last line that was cut off is dropped."""

    def __init__(self, path: Path) -> None:
        """Raises `SpecExportError` where the file cannot be opened."""
        self.path = path
        with told_when_full(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
            self._drop_half_line()

    def read(self) -> list[str]:
        """The lines that are there."""
        self._file.seek(0)
        return self._file.read().decode("utf-8").split("\n")[:-1]

    def append(self, line: str) -> None:
        """Add a line; after a full disk the file holds what it held before."""
        end = self._file.seek(0, os.SEEK_END)
        left = memoryview(line.encode() + b"\n")
        with told_when_full(self.path):
            try:
                while left:
                    left = left[self._file.write(left) :]
            except OSError:
                self._file.truncate(end)
                raise

    def _drop_half_line(self) -> None:
        self._file.seek(0)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

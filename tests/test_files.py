"""Files of results."""

from pathlib import Path

import pytest

from specexport.errors import ConfigError
from specexport.files import check_writable, write_whole


def test_checking_a_file_changes_nothing(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("old")
    check_writable(old)
    check_writable(tmp_path / "new.json")
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    assert old.read_text() == "old"


@pytest.mark.parametrize("name", ["", "missing/x.json", "/dev/null", "file/x.json"])
def test_what_cannot_be_written_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        check_writable(tmp_path / name)


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("old and long")
    link = tmp_path / "link.json"
    link.symlink_to(path)
    write_whole(link, b"new")
    assert path.read_text() == "new"
    assert link.is_symlink()
    assert len(list(tmp_path.iterdir())) == 2

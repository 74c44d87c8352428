# SPDX-License-Identifier: Apache-2.0
import os
import pickle
from pathlib import Path

import pytest

from bionemo.common.errors import UserError
from bionemo.common.mapped import MappedFile


def test_a_truncated_file_is_detected_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"a" * 10_000)
    file = MappedFile(path)
    file.check()
    os.truncate(path, 5_000)
    with pytest.raises(UserError, match=f"{path} was truncated from 10,000 to 5,000 bytes while it was in use"):
        file.check()


def test_a_mapped_file_may_grow_or_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"old")
    file = MappedFile(path)
    with path.open("ab") as more:
        more.write(b"er")
    file.check()
    (tmp_path / "new").write_bytes(b"n")
    os.replace(tmp_path / "new", path)
    file.check()
    assert file.data[:] == b"old" and len(file) == 3
    assert pickle.loads(pickle.dumps(file)).data[:] == b"n"
    path.unlink()
    file.check()

"""The list of what does not run on OpenCL devices names what there is."""

from __future__ import annotations

from pathlib import Path

import on_opencl

HERE = Path(__file__).parent


def test_the_list_names_files_folders_and_tests_that_exist() -> None:
    assert [name for name in on_opencl.FILES if not (HERE / name).is_file()] == []
    assert [name for name in on_opencl.FOLDERS if not (HERE / name).is_dir()] == []
    for name in on_opencl.TESTS:
        file, _, function = name.partition("::")
        assert f"def {function}(" in (HERE / file).read_text(encoding="utf-8"), name
        assert file not in on_opencl.FILES, name

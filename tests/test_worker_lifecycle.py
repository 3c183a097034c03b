"""A worker reports errors of the user's code from the user's own lines on."""

from __future__ import annotations

import pytest

from rainband.worker.lifecycle import PACKAGE, users_traceback


def error_raised_by(*files: str) -> BaseException:
    """Return an error raised in the last of these files, each of which calls the next."""
    call = "raise ArithmeticError('too many')"
    for file in reversed(files):
        function: dict[str, object] = {"call": call} if callable(call) else {}
        exec(compile(f"def run():\n    {'call()' if callable(call) else call}\n", file, "exec"), function)
        call = function["run"]  # type: ignore[assignment]
    with pytest.raises(ArithmeticError) as raised:
        call()  # type: ignore[operator]
    error = raised.value
    error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this function
    return error


def test_frames_of_the_package_before_the_users_code_are_left_out() -> None:
    text = users_traceback(error_raised_by(str(PACKAGE / "worker" / "worker.py"), "/home/ada/train.py"))
    assert "/home/ada/train.py" in text and "worker.py" not in text


@pytest.mark.parametrize("folder", ["/home/ada/rainband", "/home/ada/rainband/examples", str(PACKAGE) + "_project"])
def test_a_users_file_in_another_folder_named_rainband_keeps_its_frame(folder: str) -> None:
    text = users_traceback(
        error_raised_by(str(PACKAGE / "worker" / "worker.py"), f"{folder}/train.py", "/usr/lib/python3/numbers.py")
    )
    assert f"{folder}/train.py" in text and "worker.py" not in text


def test_an_error_of_the_package_alone_is_shown_in_full() -> None:
    assert "worker.py" in users_traceback(error_raised_by(str(PACKAGE / "worker" / "worker.py")))

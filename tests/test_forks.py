"""What tests may believe of a process that is a fork."""

import socket
import threading

import pytest
from forks import Forked


def test_a_fork_whose_keeper_is_gone_has_not_ended_well(tmp_path):
    place = str(tmp_path / "door")

    def go():
        line, _ = door.accept()
        with line:
            line.sendall((1).to_bytes(8, "big"))
            while not line.recv(1 << 16).endswith(b"]"):
                pass

    with socket.socket(socket.AF_UNIX) as door:
        door.bind(place)
        door.listen()
        threading.Thread(target=go, daemon=True).start()
        process = Forked(place, ["any.py"], env={"NAME": "value"}, cwd="]")
        with pytest.raises(ConnectionError):
            process.wait(60)
        assert process.returncode is None


def test_forks_draw_different_numbers_without_a_seed(forked, tmp_path):
    (tmp_path / "draw.py").write_text("import random, numpy\nprint(numpy.random.random(), random.random())")
    both = [forked([tmp_path / "draw.py"]).communicate(60)[0].split() for _ in range(2)]
    assert len({number for one in both for number in one}) == 4

"""What tests may believe of a process that is a fork."""

import os
import select
import socket
import threading

import forks
import pytest
from forks import FORKS, Forked


def test_a_fork_whose_keeper_is_gone_has_not_ended_well():
    place = f"{os.environ[FORKS]}.gone.{os.getpid()}"

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


def test_what_a_failed_test_left_running_ends_with_the_run(forked, tmp_path):
    (tmp_path / "wait.py").write_text("import time\ntime.sleep(300)")
    place, (life, held), (ours, theirs) = f"{os.environ[FORKS]}.last.{os.getpid()}", os.pipe(), os.pipe()
    with open(life) as life, open(theirs) as theirs, open(ours):
        with open(held):
            keeper = forked([forks.__file__, "serve", place], stdin=life)
            waits = Forked(place, [tmp_path / "wait.py"], stdout=theirs)
            assert waits.poll() is None
            theirs.close()
        assert keeper.wait(60) == 0
        assert select.select([ours], [], [], 20)[0], "it still runs"
